"""SmolLM2's perplexity on a fixed text with weights in FP8: what the rounding costs."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.model.passes import in_chunks
from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import DEFAULT_MODEL, pull, resolve
from twolane.model.load.weights import load_decoder

TEXT = Path(__file__).parents[2] / "LICENSE"
TOKENS = 1536


def perplexity(logits: Tensor, tokens: Tensor) -> float:
    return math.exp(float(nn.functional.cross_entropy(logits[:-1], tokens[1:])))


def rounded(x: Tensor) -> Tensor:
    """What e4m3 with one scale for each row holds of `x`."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


def round_products(model: nn.Module) -> None:
    """Let the linear modules of the layers have weights and activations as e4m3 holds them."""
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(rounded(module.weight))
            module.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0]))


@pytest.mark.full
def test_fp8_costs_what_its_rounding_costs() -> None:
    """The same rounding in `transformers`, in float32, costs the same to 1 %.

    A last bit that differs rounds some activation the other way, and after some layers most of
    them: what is compared are two draws of the same noise, on a short text.
    """
    path = pull(DEFAULT_MODEL, lambda *_: None)
    source = resolve(DEFAULT_MODEL)
    tokens = torch.tensor(
        load_tokenizer(resolve(str(path))).backend.encode(TEXT.read_text()).ids[:TOKENS]
    )
    assert len(tokens) == TOKENS
    ours, plain = (
        perplexity(in_chunks(load_decoder(source, quantization=q), tokens, [TOKENS]), tokens)
        for q in ("fp8", None)
    )
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    round_products(model)
    emulated = perplexity(model(tokens[None]).logits[0], tokens)
    print(f"perplexity: float32 {plain:.4f}, fp8 {ours:.4f}, emulated {emulated:.4f}")
    assert abs(ours / emulated - 1) < 0.01
    assert 0 < ours / plain - 1 < 0.05
