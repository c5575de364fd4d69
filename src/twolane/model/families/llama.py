"""Llama 2 and 3, and the many models that are published as Llama."""

from twolane.model.families.family import Family, GGUFFacts

_LLAMA31_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 10_000.0, "original_max_position_embeddings": 64},
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf=GGUFFacts(("llama",), permuted=True),
    fixtures={
        "llama2": {"num_key_value_heads": 4},
        "llama31": {"rope_parameters": _LLAMA31_ROPE, "tie_word_embeddings": True},
        "llama-bias": {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LINEAR_ROPE},
    },
)
