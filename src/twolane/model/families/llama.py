"""Llama 2 and 3, and the many models that are published as Llama."""

from twolane.model.families.family import Family, GGUFFacts

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf=GGUFFacts(("llama",), permuted=True),
)
