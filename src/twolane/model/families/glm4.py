"""GLM-4 (0414): GLM with norms of the outputs, too."""

from twolane.model.families.family import JOINED_GATE_UP, Family, GGUFFacts
from twolane.model.families.glm import GlmConfig

FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    config=GlmConfig,
    norms={
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
    joined=(JOINED_GATE_UP,),
    partly_rotated=True,
    interleaved=True,
    gguf=GGUFFacts(("glm4",)),
)
