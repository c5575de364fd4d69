"""Why much used architectures are not served."""

_IMAGES = "models of images are not built"
_LATENT = "latent attention is not built"
_LINEAR = "linear attention is not built"
_WIDE = "heads of 256 are not built"

REFUSED = {
    "GptOssForCausalLM": "attention sinks and MXFP4 experts are not built",
    "GemmaForCausalLM": _WIDE,
    "Gemma2ForCausalLM": _WIDE,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "Qwen3NextForCausalLM": _LINEAR,
    "GraniteMoeHybridForCausalLM": _LINEAR,
    "Llama4ForConditionalGeneration": _IMAGES,
}
"""The reason for each architecture."""
