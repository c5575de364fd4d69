"""Ranks have the parts of a model, and together they compute what one rank computes."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tests.model.checkpoints import BY_KIND, make_checkpoint
from tests.model.quantised_checkpoints import (
    FORMATS,
    Writer,
    awq,
    is_linear,
    packed,
    write,
    write_as,
)
from tests.server.serving import PATIENCE
from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings
from twolane.lanes.load import load
from twolane.model.attention import Batch, KVCache, Segment
from twolane.model.decoder import Decoder, Weights
from twolane.model.load.checkpoint import WeightsError, expected_tensors
from twolane.model.load.dummy import Dummy
from twolane.model.load.facts import ModelFacts
from twolane.model.load.hub import resolve
from twolane.model.load.safetensors import Safetensors
from twolane.model.load.weights import _Loader, load_weights
from twolane.model.matrix import Matrix
from twolane.model.mlp import Experts
from twolane.model.sharding import Shard
from twolane.model.spec import ModelSpec, MoeSpec
from twolane.parallel import group as group_module
from twolane.parallel.group import LOOPBACK, CpuGroup, RankLost, connected, meeting_place

TOKENS = [5, 17, 3, 250, 99, 128, 8, 64, 201, 31]
EIGHT = ModelSpec("llama", 3, 64, 8, 2, 8, 96, 256, 128, qkv_bias=True, o_bias=True, mlp_bias=True)


def groups(size: int) -> list[CpuGroup]:
    """Ranks that are threads here."""
    meeting = meeting_place()

    def rank(number: int) -> CpuGroup:
        return CpuGroup(number, size, dist.TCPStore("127.0.0.1", meeting.port, is_master=False))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def together(size: int, run: Callable[[CpuGroup], Tensor]) -> list[Tensor]:
    """What each rank comes to; each is a thread."""

    def rank(group: CpuGroup) -> Tensor:
        group.bind("prefill")
        with torch.inference_mode():
            return run(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, groups(size)))


def logits(decoder: Decoder, rounded: bool = False) -> Tensor:
    """Logits after each of the tokens; on a rank other than 0 its part of them."""
    pages = list(range(-(-len(TOKENS) // 4)))
    kv = KVCache(decoder.spec, len(pages), 4, decoder.dtype, requests=1, rounded=rounded)
    batch = Batch.build([Segment(0, len(TOKENS), pages, 0)], 4)
    hidden = decoder.embed(torch.tensor(TOKENS))
    for i in range(decoder.spec.layers):
        hidden = decoder.layer(i, hidden, batch, kv)
    return decoder.head(hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_ranks_do_not_divide(tied: bool, tmp_path: Path) -> None:
    sizes = {"vocab_size": 257, "tie_word_embeddings": tied}
    check_ranks("llama31", tmp_path, sizes)


@pytest.mark.parametrize("family", BY_KIND)
def test_ranks_compute_what_one_computes(family: str, tmp_path: Path) -> None:
    """Four ranks of models of two KV heads: each head is on two ranks."""
    check_ranks(family, tmp_path)


def check_ranks(family: str, tmp_path: Path, sizes: dict[str, Any] | None = None) -> None:
    source = resolve(str(make_checkpoint(family, tmp_path / "model", seed=2, sizes=sizes)))
    with torch.inference_mode():
        alone = logits(Decoder(*load_weights(source)))
    for size in (2, 4):

        def ranked(group: CpuGroup, size: int = size) -> Tensor:
            spec, weights = load_weights(source, rank=group.rank, ranks=size)
            return logits(Decoder(spec, weights, group))

        torch.testing.assert_close(together(size, ranked)[0], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_ranks_have_parts_of_what_one_rounds(family: str, tmp_path: Path) -> None:
    """Numbers and scales are those of one rank. Activations are rounded by parts of a row."""
    source = resolve(str(make_checkpoint(family, tmp_path / "model", seed=2)))
    spec, whole = load_weights(source, quantization="fp8")
    with torch.inference_mode():
        alone = logits(Decoder(spec, whole))
        exact = logits(Decoder(*load_weights(source)))
    parts = {}

    def ranked(group: CpuGroup) -> Tensor:
        spec, weights = load_weights(source, quantization="fp8", rank=group.rank, ranks=2)
        parts[group.rank] = weights.layers[0]
        return logits(Decoder(spec, weights, group))

    apart = (together(2, ranked)[0] - alone).norm()
    assert 0 < apart < 1.5 * (alone - exact).norm()
    for kind in (lambda layer: layer.o, lambda layer: layer.mlp.down):
        joined = torch.cat([kind(parts[rank]).dequantised() for rank in range(2)], dim=1)
        assert torch.equal(joined, kind(whole.layers[0]).dequantised())


SIZES = {"hidden_size": 256, "intermediate_size": 512}
"""Whole blocks of 128 columns on two ranks, while keys and values end within blocks of rows."""


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2", "fp8"),
        ("qwen2", "float-quantized-tensor"),
        ("qwen2", "awq"),
        ("qwen2", "pack-quantized-zeros"),
        ("qwen3-moe", "float-quantized-channel"),
        ("qwen3-moe", "gptq"),
    ],
)
def test_ranks_share_quantised_checkpoints(family: str, form: str, tmp_path: Path) -> None:
    """Together their matrices are those of one rank."""
    write(tmp_path / "quantised", tmp_path / "floats", form, family, **SIZES)
    source = resolve(str(tmp_path / "quantised"))
    spec, whole = load_weights(source)
    with torch.inference_mode():
        alone = logits(Decoder(spec, whole))
    parts = {}

    def ranked(group: CpuGroup) -> Tensor:
        spec, weights = load_weights(source, rank=group.rank, ranks=2)
        parts[group.rank] = weights.layers[0]
        return logits(Decoder(spec, weights, group))

    found = together(2, ranked)[0]
    joined = torch.cat([parts[rank].o.dequantised() for rank in range(2)], dim=1)
    assert torch.equal(joined, whole.layers[0].o.dequantised())
    if form.startswith(("fp8", "float")):  # activations are rounded by parts of a row
        exact = logits(Decoder(*load_weights(resolve(str(tmp_path / "floats")))))
        assert (found - alone).norm() < 1.5 * (alone - exact).norm()
    else:
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", {"hidden_size": 192, "intermediate_size": 512}),
        ("qwen3-moe", {"hidden_size": 256}),
    ],
)
def test_blocks_that_ranks_would_split_get_a_scale_for_each_row(
    family: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    write(tmp_path / "quantised", tmp_path / "floats", "fp8", family, **sizes)
    source = resolve(str(tmp_path / "quantised"))
    spec, whole = load_weights(source)
    name = "o" if family == "qwen2" else "down"
    with torch.inference_mode():
        alone = logits(Decoder(spec, whole))
    parts = {}

    def ranked(group: CpuGroup) -> Tensor:
        spec, weights = load_weights(source, rank=group.rank, ranks=2)
        parts[group.rank] = matrix_of(weights, name)
        return logits(Decoder(spec, weights, group))

    found = together(2, ranked)[0]
    assert {part.scheme for part in parts.values()} == {"fp8_channel"}
    joined = torch.cat([parts[rank].dequantised() for rank in range(2)], dim=1)
    meant = matrix_of(whole, name).dequantised()
    assert 0 < (joined - meant).norm() < 0.04 * meant.norm()  # e4m3 has three bits
    exact = logits(Decoder(*load_weights(resolve(str(tmp_path / "floats")))))
    assert (found - exact).norm() < 2 * (alone - exact).norm()


def matrix_of(weights: Weights, name: str) -> Matrix:
    """A matrix of the first layer: attention's output, or the first expert's second one."""
    layer = weights.layers[0]
    if name == "o":
        return layer.o
    assert isinstance(layer.mlp, Experts)
    return layer.mlp.down


def test_columns_that_share_a_scale_stay_together(tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 512}
    write(tmp_path / "quantised", tmp_path / "floats", "awq", **sizes)
    source = resolve(str(tmp_path / "quantised"))
    with pytest.raises(WeightsError, match=r"o_proj: 4 ranks cannot share it: columns 0 to 48 cut"):
        load_weights(source, rank=0, ranks=4)


@pytest.mark.parametrize("form", ["awq", "pack-quantized-zeros"])
def test_groups_that_ranks_would_cut_are_narrower(form: str, tmp_path: Path) -> None:
    """As those of 128 columns of a matrix of 29,568, which Qwen2.5-72B-AWQ has: two halves of a
    group have its scale, so that no number changes."""
    writer = {"awq": awq, "pack-quantized-zeros": partial(packed, symmetric=False)}[form]

    def of(module: str) -> Writer | None:
        return partial(writer, group=128) if is_linear(f"{module}.weight") else None

    [group] = FORMATS["pack-quantized"][1]["config_groups"].values()
    weights = {**group["weights"], "group_size": 128, "symmetric": False}
    wider = {"config_groups": {"group_0": {**group, "weights": weights}}, "group_size": 128}
    folders = tmp_path / "quantised", tmp_path / "floats"
    write_as(*folders, of, {**FORMATS[form][1], **wider}, hidden_size=128, intermediate_size=384)
    source = resolve(str(folders[0]))
    _, whole = load_weights(source)
    parts = [load_weights(source, rank=rank, ranks=2)[1] for rank in range(2)]
    for kind in (lambda weights: weights.layers[0].o, lambda weights: weights.layers[1].mlp.down):
        assert {kind(part).scheme for part in parts} == {"int4_g64"}
        joined = torch.cat([kind(part).dequantised() for part in parts], dim=1)
        assert torch.equal(joined, kind(whole).dequantised())


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_round_keys_and_values_as_one_does(size: int, tmp_path: Path) -> None:
    """Each head of a token has a scale of its own, so that it does not matter who has the head."""
    source = resolve(str(make_checkpoint("qwen3", tmp_path / "model", seed=2)))
    with torch.inference_mode():
        alone = Decoder(*load_weights(source))
        exact, expected = logits(alone), logits(alone, rounded=True)

    def ranked(group: CpuGroup) -> Tensor:
        spec, weights = load_weights(source, rank=group.rank, ranks=size)
        return logits(Decoder(spec, weights, group), rounded=True)

    # A key or value that differs in its last bit may be rounded the other way.
    apart = (together(size, ranked)[0] - expected).abs().mean()
    assert apart < 0.1 * (exact - expected).abs().mean()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_biases_are_added_once(size: int) -> None:
    def decoder(rank: int, ranks: int, group: CpuGroup | None = None) -> Decoder:
        wanted = expected_tensors(ModelFacts("biases", EIGHT)).items()
        shapes = {name: stored.shapes[0] for name, stored in wanted}
        tensors = Dummy(shapes, 0, torch.device("cpu"))
        shard = Shard(EIGHT, rank, ranks)
        device, dtype = torch.device("cpu"), torch.float32
        facts = ModelFacts("biases", shard.spec)
        weights = _Loader(facts, shard, tensors, None, dtype, device).weights(lambda *_: None)
        return Decoder(EIGHT, weights, group)

    with torch.inference_mode():
        alone = logits(decoder(0, 1))
    ranks = together(size, lambda group: logits(decoder(group.rank, size, group)))
    torch.testing.assert_close(ranks[0], alone, rtol=1e-4, atol=1e-5)


def test_only_a_rank_s_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve(str(make_checkpoint("qwen2", tmp_path / "model")))
    read: list[int] = []
    get = Safetensors.get

    def counted(files: Safetensors, name: str, cut: object = None) -> Tensor:
        tensor = get(files, name, cut)  # type: ignore[arg-type]
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Safetensors, "get", counted)
    spec, _ = load_weights(source, rank=1, ranks=2)
    norms = (2 * spec.layers + 1) * spec.hidden_size
    whole = spec.parameters - norms
    assert sum(read) - norms == whole // 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"heads": 6, "kv_heads": 2}, "6 attention heads"),
        ({"intermediate_size": 90}, "90 MLP columns"),
        ({"heads": 12, "kv_heads": 6}, "6 KV heads"),
        ({"moe": MoeSpec(4, 2, 30)}, "30 columns of an expert"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(change: dict[str, Any], what: str) -> None:
    with pytest.raises(FieldError, match=what) as refused:
        Shard(replace(EIGHT, **change), 0, 4)
    assert refused.value.field == "tensor_parallel_size"


class Noted:
    """A channel that tells when a sum has its place among those of its rank."""

    def __init__(self, channel: Any, begun: threading.Event) -> None:
        self._channel, self._begun = channel, begun

    def allgather(self, *tensors: list[Any]) -> Any:
        work = self._channel.allgather(*tensors)
        self._begun.set()
        return work


def crossing() -> list[list[float]]:
    """Both lanes reduce on both ranks; rank 1's decode lane comes first, rank 0's comes last."""
    sums: dict[tuple[int, str], list[float]] = {}
    first, begun = {(0, "prefill"), (1, "decode")}, [threading.Event() for _ in range(2)]

    def lane(group: CpuGroup, name: str) -> None:
        group.bind(name)  # type: ignore[arg-type]
        if (group.rank, name) in first:
            group._bound.channel = Noted(group._bound.channel, begun[group.rank])
        else:
            assert begun[group.rank].wait(PATIENCE)
        value = 1.0 if name == "prefill" else 100.0
        sums[group.rank, name] = group.all_reduce(torch.full((4,), value)).tolist()

    jobs = [(group, name) for group in groups(2) for name in ("prefill", "decode")]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda job: lane(*job), jobs))
    return [sums[rank, name] for rank in range(2) for name in ("prefill", "decode")]


def test_each_lane_has_a_channel_of_its_own() -> None:
    assert crossing() == [[2.0] * 4, [200.0] * 4] * 2


def test_lanes_that_share_a_channel_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        group_module, "CHANNELS", dict.fromkeys(("prefill", "decode", "device"), "one")
    )
    assert crossing() != [[2.0] * 4, [200.0] * 4] * 2


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    first, _second = groups(2)
    channel = first._channels["decode"]
    assert channel.options._timeout == timedelta(seconds=group_module.COLLECTIVE_TIMEOUT_SECONDS)
    channel._set_default_timeout(timedelta(seconds=1.0))
    first.bind("decode")
    with pytest.raises(
        RankLost, match=r"rank 0 of 2 did not hear from the others .* decode channel"
    ):
        first.all_reduce(torch.ones(4))


def test_the_time_to_connect_begins_when_all_ranks_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waits = [0.0], threading.Event()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(group_module, "time", clock)
    store, both = dist.HashStore(), threading.Barrier(2)

    def wait_for_rank_0(times: int) -> None:
        for _ in range(times):
            waits.clear()
            assert waits.wait(PATIENCE)

    def meet(rank: int) -> str:
        if rank == 1:  # it still loads, for longer than to connect may take
            wait_for_rank_0(1)
            now[0] += 2 * group_module.CONNECT_SECONDS
        check = (waits.set, lambda: None)[rank]
        return connected("prefill", rank, 2, store, check, lambda _: connect(rank))

    def connect(rank: int) -> str:
        if rank == 1:
            wait_for_rank_0(3)  # which has met it by then
        return str(both.wait(PATIENCE))

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(meet, range(2))) == ["0", "1"]


def test_a_channel_that_cannot_be_made_says_why() -> None:
    def refused(store: dist.Store) -> None:
        raise OSError("no interface")

    asked = iter(range(100))
    with pytest.raises(OSError, match="no interface"):
        connected("prefill", 0, 1, dist.HashStore(), lambda: next(asked), refused)


def test_sums_are_added_in_rank_order() -> None:
    """The bits of a row do not depend on its place in the batch: 1e8 - 1e8 + 1 is not 1 - 1e8."""
    parts = [1e8, 1.0, -1e8]

    def reduce(group: CpuGroup) -> Tensor:
        return group.all_reduce(torch.full((97, 5), parts[group.rank]))

    want = torch.full((97, 5), parts[0]) + parts[1] + parts[2]
    assert all(torch.equal(got, want) for got in together(3, reduce))


@pytest.mark.parametrize("way", ["two-shot", "joined"])
def test_how_to_sum_is_asked_of_several_gpus_alone(way: str) -> None:
    settings = DeviceSettings(model="tiny", device="cpu", all_reduce=way)
    with pytest.raises(FieldError, match="all_reduce") as refused:
        load(settings, lambda *_: None)
    assert refused.value.field == "all_reduce"


def test_no_other_host_reaches_the_place_where_ranks_meet() -> None:
    store = meeting_place()
    socket.create_connection((LOOPBACK, store.port)).close()
    # Another address of this host's: what is bound to all of them would answer.
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=5.0):
        pass
