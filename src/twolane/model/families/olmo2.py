"""OLMo 2: norms of outputs alone, and of all queries and all keys together.

GGUF files call Olmo 3 so, too.
"""

from twolane.model.families.family import POST_NORMS, Family, GGUFFacts, HFConfig


class Olmo2Config(HFConfig, kw_only=True):
    """OLMo 2's defaults."""

    vocab_size: int = 50_304
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 50_279


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    config=Olmo2Config,
    norms=POST_NORMS,
    qk_norm="whole",
    gguf=GGUFFacts(("olmo2",), full_each=4, sliding_base=lambda rope: rope.theta),
)
