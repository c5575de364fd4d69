"""The GPU's decoder says what the CPU's says, cut after a layer and going on to decode."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import DEVICE
from tests.model.adapters import make_adapter
from tests.model.checkpoints import HYBRIDS, make_checkpoint
from tests.model.passes import cost_of, distance
from twolane.kernels.decode_attention.dispatch import decode_scratch
from twolane.kernels.delta_rule.convolution import PromptStates
from twolane.kernels.delta_rule.prefill import prompt_lists
from twolane.kernels.prefill_attention.dispatch import PrefillPlan, PrefillWorkspace
from twolane.kernels.products.dispatch import GpuProducts
from twolane.lanes.cuda.forward_batch import DecodeRows, MixedRows
from twolane.lanes.work import PromptRow
from twolane.model import fp8
from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder
from twolane.model.gpu_decoder import GpuDecoder, GpuKVCache, GpuStatePool, Rows, Workspace
from twolane.model.gpu_lora import GpuAdaptedProducts, GpuAdapterPool
from twolane.model.load.hub import resolve
from twolane.model.load.peft import read_adapter
from twolane.model.load.weights import load_weights
from twolane.model.lora import AdaptedProducts, AdapterPool
from twolane.model.matrix import Matrix
from twolane.model.products import Products

PAGE = 16
PAGES = [3, 1, 4, 2]
PROMPT = 37
UNITS = 3
FAMILIES = (
    *("hunyuan-moe", "lfm2", "lfm2-moe", "muse-glimmer", "laguna"),
    *("qwen2-sliding", "qwen3-moe", "granite", "olmo2", "qwen3.5", "gemma4-inputs", "gemma4-moe"),
    pytest.param("qwen3-next", marks=pytest.mark.full),
    *(
        pytest.param(family, marks=pytest.mark.full)
        for family in ("llama-bias", "mistral", "ministral3", "qwen3", "smollm3", "glm4")
    ),
    pytest.param("phi4-mini", marks=pytest.mark.full),
    "gpt-oss",
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class OnGpu:
    """One prompt in slot 1, in prefill and then in decode."""

    def __init__(self, decoder: GpuDecoder, dtype: torch.dtype = torch.float32) -> None:
        self.decoder, self.spec, self.dtype = decoder, decoder.spec, dtype
        device = torch.device(DEVICE)
        states = GpuStatePool(self.spec, 2, dtype, device)
        self.kv = GpuKVCache(self.spec, 6, PAGE, dtype, device, states=states)
        for layer in (*self.kv.layers, *(part for each in states.layers.values() for part in each)):
            layer.fill_(float("nan"))  # what nobody wrote must not be read: it would show
        self.workspace = Workspace(self.spec, dtype, device)

    def layers(
        self,
        first: int,
        last: int,
        hidden: torch.Tensor,
        rows: Rows,
        products: GpuProducts | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        products = products or GpuProducts(UNITS)
        self.decoder.layers(first, last, hidden, rows, self.kv, self.workspace, products, tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden.new_empty((len(hidden), self.spec.vocab_size), dtype=torch.float32)
        self.decoder.head(hidden, logits, self.workspace, GpuProducts(UNITS))
        return logits

    def prompt(self) -> MixedRows:
        positions = torch.arange(PROMPT, dtype=torch.int32, device=DEVICE)
        write_slots = ints(*(PAGES[p // PAGE] * PAGE + p % PAGE for p in range(PROMPT)))
        plans = {
            key: PrefillPlan.build(
                [(0, PROMPT)],
                [PAGES],
                page_size=PAGE,
                heads=key.heads,
                kv_heads=key.kv_heads,
                dim=key.dim,
                dtype=self.dtype,
                units=UNITS,
                workspace=PrefillWorkspace(DEVICE),
                window=key.window,
            )
            for key in map(self.decoder.plan_key, range(self.spec.layers))
        }
        [lists] = prompt_lists([PromptRow(1, 0, PROMPT).parts()])
        states = PromptStates(*(torch.from_numpy(each).int().to(DEVICE) for each in lists))
        return MixedRows(self.decoder, positions, write_slots[None], plans, prompts=[states])

    def step(self) -> DecodeRows:
        """Row 0 is padding."""
        tables = torch.zeros(1, 3, len(PAGES), dtype=torch.int32, device=DEVICE)
        tables[0, 1] = ints(*PAGES)
        sizes = (max(getattr(at, n) for at in self.spec.each) for n in ("heads", "head_dim"))
        scratch = decode_scratch(2, *sizes, UNITS, DEVICE)
        lengths = ints(0, PROMPT + 1)
        return DecodeRows(
            self.decoder, tables, ints(2, 1), ints(0, PROMPT), lengths, scratch, UNITS
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits(family: str, tmp_path: Path) -> None:
    # Every kind of layer that a family has.
    deep = any(part in family for part in ("sliding", "gemma", "laguna"))
    layers = 4 if deep or family in HYBRIDS else 2
    path = make_checkpoint(family, tmp_path / family, seed=1, layers=layers)
    spec, weights = load_weights(resolve(str(path)))
    _, there = load_weights(resolve(str(path)), dtype="float32", device=DEVICE)
    tokens = torch.randint(3, 250, (PROMPT + 1,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = on_cpu(Decoder(spec, weights), tokens).to(DEVICE)
        gpu, tokens = OnGpu(GpuDecoder(spec, there)), tokens.to(DEVICE)
        hidden = gpu.decoder.embed(tokens[:-1], None)
        for first, last in ((0, 1), (1, spec.layers)):
            gpu.layers(first, last, hidden, gpu.prompt(), tokens=tokens[:-1])
        torch.testing.assert_close(gpu.logits(hidden), expected[:-1], atol=2e-3, rtol=0)
        hidden = gpu.decoder.embed(tokens[[0, -1]], None)
        gpu.layers(0, spec.layers, hidden, gpu.step(), tokens=tokens[[0, -1]])
        torch.testing.assert_close(gpu.logits(hidden)[1], expected[-1], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-moe",
        *(
            pytest.param(family, marks=pytest.mark.full)
            for family in ("llama-bias", "qwen3", "olmo2")
        ),
    ],
)
def test_fp8_rounds_as_on_a_cpu(family: str, tmp_path: Path) -> None:
    """Activations and weights in e4m3. Sums that differ in a bit round a few activations the other
    way, which moves less than one rounding of all of them."""
    path = make_checkpoint(family, tmp_path / family, seed=1, layers=2)
    spec, weights = load_weights(resolve(str(path)), quantization="fp8")
    tokens = torch.randint(3, 250, (PROMPT,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = on_cpu(Decoder(spec, weights), tokens).to(DEVICE)
        gpu, tokens = OnGpu(GpuDecoder(spec, weights)), tokens.to(DEVICE)
        hidden = weights.embedding[tokens]
        gpu.layers(0, spec.layers, hidden, gpu.prompt())
        logits = gpu.logits(hidden)
    assert distance(logits, expected) < cost_of(1)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param("olmo2", None, marks=pytest.mark.full),
        pytest.param("gemma4-moe", None, marks=pytest.mark.full),
        ("qwen3", "fp8"),
    ],
)
def test_adapters_add_what_they_add_on_a_cpu(
    family: str, scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To products that a norm follows, and to those of rows in e4m3, which they are computed of."""
    if scheme is not None and DEVICE == "cuda":
        pytest.skip("its products of e4m3 are not float32: tests/gpu/test_lora.py")
    layers = 4 if family.startswith("gemma4") else 2  # its fixtures list each layer
    path = make_checkpoint(family, tmp_path / family, seed=1, layers=layers)
    spec, weights = load_weights(resolve(str(path)), quantization=scheme)
    loading = {"dtype": "float32", "quantization": scheme, "device": DEVICE}
    _, there = load_weights(resolve(str(path)), **loading)
    right, gpu = Decoder(spec, weights), OnGpu(GpuDecoder(spec, there))
    shard, slots = gpu.decoder.shard, np.arange(PROMPT) % 4 - 1
    pool, there_too = AdapterPool(weights, 3), GpuAdapterPool(shard, there, 3, 20)
    for slot, rank in enumerate((1, 16, 20)):
        adapter = make_adapter(path, tmp_path / str(rank), rank=rank, strength=0.5)
        read = read_adapter(adapter, shard, torch.float32)
        pool.put(slot, read)
        there_too.put(slot, read)
    if scheme is not None:
        adapted = AdaptedProducts._adapted

        def of_rounded(
            self: AdaptedProducts, out: torch.Tensor, x: torch.Tensor, matrix: Matrix
        ) -> torch.Tensor:
            values, scales = fp8.quantise_rows(x)
            return adapted(self, out, values.float() * scales, matrix)

        monkeypatch.setattr(AdaptedProducts, "_adapted", of_rounded)
    tokens = torch.randint(3, 250, (PROMPT,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = on_cpu(right, tokens, pool.products(right.products, slots)).to(DEVICE)
        tiles = there_too.tiles(PROMPT).of_first(PROMPT)
        tiles.arrange(ints(*range(PROMPT)), ints(*slots.tolist()))
        products = GpuAdaptedProducts(GpuProducts(UNITS), there_too, tiles)
        hidden = there.embedding[tokens.to(DEVICE)] * spec.stream_scale
        gpu.layers(0, spec.layers, hidden, gpu.prompt(), products)
        logits = gpu.logits(hidden)
        plain = on_cpu(right, tokens).to(DEVICE)
    assert distance(logits, expected) < (1e-5 if scheme is None else cost_of(1))
    assert (plain - expected).norm() > 0.3 * expected.norm()


def on_cpu(
    decoder: Decoder, tokens: torch.Tensor, products: Products | None = None
) -> torch.Tensor:
    """Logits of every token; by these products of the layers, if they are not the decoder's."""
    pages = range(-(-len(tokens) // PAGE))
    kv = KVCache(decoder.spec, len(pages), PAGE, decoder.dtype, requests=1)
    batch = Batch.build([Segment(0, len(tokens), pages, 0)], PAGE)
    hidden = decoder.embed(tokens)
    for i in range(decoder.spec.layers):
        hidden = decoder.layer(i, hidden, batch, kv, products)
    return decoder.head(hidden)


def test_fixed_buffers_stay_when_others_grow(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "qwen3", seed=1)
    spec, _ = load_weights(resolve(str(path)))
    growing = Workspace(spec, torch.float32, torch.device(DEVICE))
    growing.reserve(4)
    fixed = growing.fixed()
    before = fixed.get("qkv", 4).data_ptr()
    assert growing.get("qkv", 8).data_ptr() != before
    assert fixed.get("qkv", 4).data_ptr() == before
