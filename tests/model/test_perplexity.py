"""SmolLM2's perplexity on a fixed text with weights in FP8: what the rounding costs."""

import math
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.model.checkpoints import gguf_reference, load_decoder
from tests.model.passes import in_chunks
from twolane.frontend.text.tokenizer import load_tokenizer
from twolane.model.load.hub import DEFAULT_MODEL, pull, resolve

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


DRAWS = 4
"""Embeddings that differ by one part in a million: each rounds activations another way."""


def nudged(weight: Tensor, seed: int) -> Tensor:
    """The embedding of a draw; the first is the model's own."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight * (1 + 1e-6 * noise * (seed > 0))


@pytest.mark.full
def test_fp8_costs_what_its_rounding_costs() -> None:
    """The same rounding in `transformers`, in float32, costs the same on average.

    A last bit that differs rounds some activation the other way, and after some layers most of
    them: single runs, of either, spread by 1.3 %, so means of several are compared.
    """
    path = pull(DEFAULT_MODEL)
    source = resolve(DEFAULT_MODEL)
    tokens = torch.tensor(
        load_tokenizer(resolve(str(path))).backend.encode(TEXT.read_text()).ids[:TOKENS]
    )
    assert len(tokens) == TOKENS
    plain = perplexity(in_chunks(load_decoder(source), tokens, [TOKENS]), tokens)
    decoder = load_decoder(source, quantization="fp8")
    model = gguf_reference(path)
    round_products(model)
    ours, emulated = [], []
    embedding, there = decoder.weights.embedding, model.model.embed_tokens.weight
    own, its = embedding.clone(), there.clone()
    for seed in range(DRAWS):
        embedding.copy_(nudged(own, seed))
        there.copy_(nudged(its, seed))
        ours.append(perplexity(in_chunks(decoder, tokens, [TOKENS]), tokens))
        emulated.append(perplexity(model(tokens[None]).logits[0], tokens))
    mean, other = statistics.mean(ours), statistics.mean(emulated)
    print(f"perplexity: float32 {plain:.4f}, fp8 {ours}, emulated {emulated}")
    assert abs(mean / other - 1) < 0.006
    assert 0 < mean / plain - 1 < 0.05
