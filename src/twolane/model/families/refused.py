"""Why much used architectures are not served."""

_IMAGES = "models of images are not built"
_LATENT = "latent attention is not built"
_LINEAR = "linear attention is not built"

REFUSED = {
    "GptOssForCausalLM": "attention sinks and MXFP4 experts are not built",
    "GemmaForCausalLM": "of Gemma, the third is built",
    "Gemma2ForCausalLM": "soft caps of scores and logits are not built",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "Qwen3NextForCausalLM": _LINEAR,
    "GraniteMoeHybridForCausalLM": _LINEAR,
    "Llama4ForConditionalGeneration": _IMAGES,
}
"""The reason for each architecture."""
