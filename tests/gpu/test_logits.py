"""bfloat16 and float16 logits are as near to a float32 reference as those of `transformers`.

Teacher-forced: every sequence is given, its prompt in prefill batches, its end in decode steps.
Rounding is all that may differ, and how much of it is right depends on the model; so the measure is
the error of `transformers` in the same type with the same weights, its head in float32 as ours is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from tests.gpu.forced import Forced
from tests.model.checkpoints import random_model, reference
from twolane.devices import DeviceSettings
from twolane.kernels.prefill_attention import flashinfer_kernels as fa3
from twolane.kernels.prefill_attention.schedule import Ints, Segments
from twolane.lanes.cuda.machine import CudaMachine
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_weights

WORST = 1.5
"""Times the error of `transformers`: other orders of summation, the same number of roundings."""
TOKENS, DECODED = 306, 6

_TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    ),
    "head-64": LlamaConfig(**_TINY, head_dim=64, num_key_value_heads=1, attention_bias=True),
    "head-128": Qwen3Config(**_TINY, head_dim=128, num_key_value_heads=2),
    "experts": Qwen3MoeConfig(
        **_TINY,
        head_dim=128,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        norm_topk_prob=True,
    ),
}
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = ("flashinfer", "triton")


@dataclass
class Loaded:
    """A model on the GPU, and what is right."""

    forced: Forced
    right: Tensor
    """Logits of the float32 reference, [sequences, TOKENS, vocab]."""
    limit: float
    """The most that ours may be off, as `error` counts it."""

    @property
    def levels(self) -> Sequence[tuple[int, int]]:
        return self.forced.lanes.levels

    @property
    def layers(self) -> int:
        return self.forced.spec.layers


def error(logits: Tensor, right: Tensor) -> float:
    """Root mean square over that of the reference."""
    return float((logits - right).square().mean().sqrt() / right.square().mean().sqrt())


Models = Callable[..., Loaded]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """(shape, type, attention, levels or all) → the model, each loaded once."""
    loaded: list[Loaded] = []

    @cache
    def load(
        shape: str, dtype: str, attention: str, levels: tuple[int, ...] | None = None
    ) -> Loaded:
        path = tmp_path_factory.mktemp("logits") / "model"
        random_model(SHAPES[shape], seed=1).to(TYPES[dtype]).save_pretrained(path)
        generator = torch.Generator().manual_seed(2)
        vocab = SHAPES[shape].vocab_size
        sequences = torch.randint(3, vocab, (3, TOKENS), generator=generator)
        right = reference_logits(reference(path), torch.float32, sequences)
        theirs = reference_logits(reference(path), TYPES[dtype], sequences)
        spec, weights = load_weights(resolve(str(path)), dtype=dtype, device="cuda")
        with pytest.MonkeyPatch.context() as patch:
            if attention == "triton":
                patch.setattr(fa3, "problem", lambda *_: "not in this test")
            machine = CudaMachine(spec, weights, DeviceSettings(model="", levels=levels))
            forced = Forced(machine, sequences.tolist(), TOKENS - DECODED)
        loaded.append(Loaded(forced, right, WORST * error(theirs, right)))
        return loaded[-1]

    yield load
    for each in loaded:
        each.forced.lanes.close()


def reference_logits(model: torch.nn.Module, dtype: torch.dtype, sequences: Tensor) -> Tensor:
    """Its logits, the head in float32."""
    model = model.to("cuda", dtype)
    with torch.inference_mode():
        hidden = model.model(sequences.cuda()).last_hidden_state
        return hidden.float() @ model.lm_head.weight.float().T


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits(
    shape: str, dtype: str, attention: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every level, the other lane at rest and at work; a cut after every layer."""
    if attention == "triton":
        monkeypatch.setattr(fa3, "problem", lambda *_: "not in this test")
    elif find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    model = models(shape, dtype, attention)
    errors: dict[str, float] = {}
    levels = [(p or d, d or p) for p, d in model.levels]
    for level in levels:
        for beside in (False, True):
            logits = model.forced.run(*level, (), beside=beside)
            errors[f"level {level}, beside {beside}"] = error(logits, model.right)
    for cut in range(1, model.layers):
        level = levels[cut % len(levels)]
        logits = model.forced.run(*level, (cut,), beside=cut % 2 == 0)
        errors[f"cut {cut} on {level}"] = error(logits, model.right)
    every = tuple(range(1, model.layers))
    errors["cut everywhere"] = error(model.forced.run(*levels[0], every), model.right)
    worst = max(errors, key=errors.__getitem__)
    theirs = model.limit / WORST
    print(f"{shape} {dtype} {attention}: {errors[worst]:.5f} ({worst}); theirs {theirs:.5f}")
    assert errors[worst] <= model.limit, worst


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_hybrid_passes(
    shape: str, split: bool, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass is one graph and its end another; or layer by layer. What is sampled is as likely."""
    if find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    model = models(shape, "bfloat16", "flashinfer", (32,))
    forced, prompt = model.forced, TOKENS - DECODED
    if split:  # few keys: as if launches and items were free
        monkeypatch.setattr(fa3, "_PAGED", replace(fa3._PAGED, item=0, split=0))
    whole = forced.lanes.runner.whole
    assert whole is not None
    parts, splits = whole._attention.parts, []

    def noted(segments: Segments) -> tuple[list[Ints], bool] | None:
        made = parts(segments)
        splits.append(None if made is None else made[1])
        return made

    def check() -> None:
        decoded, prompts = forced.hybrid()
        assert error(decoded, model.right[0, prompt:]) <= model.limit
        assert error(prompts, model.right[1:, :prompt]) <= model.limit
        after, begun = forced.sampled()
        right = torch.cat([model.right[0, prompt:], model.right[1:, prompt - 1]])
        chosen = right.gather(1, torch.tensor([*after, *begun], device=right.device)[:, None])
        short = (right.max(dim=1).values - chosen[:, 0]) / right.square().mean().sqrt()
        assert float(short.max()) <= 4 * model.limit, short

    monkeypatch.setattr(whole._attention, "parts", noted)
    check()
    assert None not in splits and any(splits) == split
    monkeypatch.setattr(whole, "send", lambda *_: None)
    check()


def test_logits_without_graphs(models: Models) -> None:
    """Passes with more tokens than graphs are made for are launched kernel by kernel."""
    model = models("head-128", "bfloat16", "triton")
    memory = model.forced.lanes.runner._memory["prefill"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "passes", None)
        logits = model.forced.run(*model.levels[0], (2,), beside=True)
    assert error(logits, model.right) <= model.limit
    again = model.forced.run(*model.levels[0], (2,), beside=True)
    assert error(again, model.right) <= model.limit
