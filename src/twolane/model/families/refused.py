"""Why much used architectures are not served."""

import re

_REASONS = {
    "heads whose keys and values differ in size are not built": "mimov2 mimo2",
    "predictions of several activations at a time (AltUp) are not built": "gemma3n",
    "soft caps of scores and logits are not built": "gemma2 vaultgemma",
    "of Gemma, the third and the fourth are built": "gemmafor gemma$ t5gemma paligemma",
    "diffusion of text is not built": "diffusiongemma dream llada",
    "its linear attention is not built, only the gated delta rule of Qwen3-Next and 3.5": (
        "qwen38 qwen4 kimilinear olmohybrid bailinghybrid minimaxfor minimaxm1 minimaxtext glm5next"
    ),
    "sparse attention, whose keys an indexer chooses, is not built": (
        "deepseekv32 deepseekv4 glmmoedsa glmdsa minimaxm3 mistrallarge4 hyv4"
    ),
    "multi-head latent attention is not built": (
        "deepseekv2 deepseekv3 deepseek2 deepseekvlv2 deepseekocr kimi glm4moelite longcat "
        "mistral4 minicpm3 youtu axk plm(for|$)"
    ),
    "layers that keep a state (Mamba and its kin) are not built": (
        "mamba nemotronh granitehybrid bamba falconh1 falconmamba jamba zamba "
        "zaya plamo2 rwkv arwkv xlstm recurrentgemma"
    ),
    "of LFM, the text models LFM2 and LFM2.5 are built": "lfm2vl lfm3",
    "clamped gates of experts, whose bound differs by layer, are not built": "step3p5 step3p7",
    "its layers are described only by code in its repository, and are not built": (
        "interns2 plamo3"
    ),
    "attention in chunks is not built": "llama4",
    "LayerNorm is not built": (
        "gpt2 gptneo gptj gptbigcode optfor bloom falcon mpt phifor phi2 phimoe stablelm "
        "starcoder codegen cohere commandr dbrx nemotron(for|$)"
    ),
    "encoders are not served; embeddings come from decoders, such as Qwen3-Embedding": (
        "bert roberta xlmroberta modernbert nomicbert neobert eurobert jinabert distilbert "
        "deberta electra mpnet newmodel gtemodel"
    ),
    "encoders beside a decoder are not built": ("t5 mt5 bart mbart marian m2m100 pegasus whisper"),
    "classifiers and rerankers are not served": ".*forsequenceclassification$",
}
"""Expressions that match the beginnings of the names, in small letters and digits, that a reason
holds for; an earlier reason comes first."""


def reason(architecture: str) -> str | None:
    """Return why an architecture is not served; None: nothing is known of it.

    Args:
        architecture: The name in `config.json` or in a GGUF file, or the `model_type`.
    """
    name = re.sub("[^a-z0-9]", "", architecture.lower()).removeprefix("modeltype")
    found = (why for why, begins in _REASONS.items() if re.match("|".join(begins.split()), name))
    return next(found, None)
