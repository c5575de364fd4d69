"""A GPU made ready to serve: weights, levels, KV pool, decode graphs, lanes."""

import bisect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import TypeVar

import torch

from twolane.common.errors import FieldError
from twolane.devices import DeviceSettings, LaneName, MachineKind, OnProgress
from twolane.kernels.decode_attention.dispatch import MAX_GROUP
from twolane.kernels.pool import E4M3
from twolane.kernels.prefill_attention.dispatch import choose
from twolane.kernels.prefill_attention.flashinfer_kernels import UNPACKED_TOKENS
from twolane.kernels.products.dispatch import SERVED_SCHEMES
from twolane.kernels.sizes import (
    FIRST_BUCKETS,
    FIRST_SIZES,
    GRAPH_BYTES,
    KEY_TILE,
    SIZES,
    WORKSPACE_TOKENS,
)
from twolane.lanes import work
from twolane.lanes.cuda.decode_graphs import DecodeGraphs, LevelGraphs
from twolane.lanes.cuda.green_contexts import GreenContexts, NoGreenContexts
from twolane.lanes.cuda.lanes import CudaLanes
from twolane.lanes.cuda.launch_thread import Launcher
from twolane.lanes.cuda.layer_graphs import PassGraphs
from twolane.lanes.cuda.runner import CudaRunner
from twolane.lanes.cuda.slots import Slots
from twolane.lanes.settings import LaneSizes, without_adapters
from twolane.model import gpu_decoder
from twolane.model.decoder import Weights
from twolane.model.gpu_lora import GpuAdapterPool, pool_bytes
from twolane.model.page_layout import PageLayout
from twolane.model.spec import ModelSpec
from twolane.parallel.channel import Channel, NullChannel
from twolane.sampling import SamplingParams

T = TypeVar("T")
log = logging.getLogger("twolane.cuda")

PINNED_BLOCKS, PINNED_POWERS = 32, range(2, 19)
"""Blocks of pinned memory allocated for each size that PyTorch rounds to (powers of two from 4
bytes to 256 KiB): a launch takes fewer than ten, and few are queued at a time."""


class CudaMachine:
    """A GPU with a model on it.

    Args:
        spec: the model's shape.
        weights: The model's weights, on the device.
        settings: The engine's settings; without `levels`, every multiple of 16 SMs is one.
        rank: The rank of this process, if several share the model.

    Raises:
        FieldError: there is no room for the adapters.
        ValueError: a level cannot be had, or the kernels do not serve the model's heads.
    """

    kind: MachineKind = "cuda"
    settles = True
    page_sizes: Sequence[int] = (32, 16, 64)
    revision = ""
    runner_type: type[CudaRunner] = CudaRunner
    decodes, prefills = True, True
    """Whether this GPU takes decode steps, and whether it computes prompts: graphs are captured of
    what it does."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, settings: DeviceSettings, rank: int = 0
    ) -> None:
        self.tp = settings.tensor_parallel_size
        self.pass_sizes: Sequence[int] = SIZES
        """See `Machine.pass_sizes`: those of the graphs, when there are some."""
        self.channels: Mapping[LaneName, Channel] = {}
        """Channels of the lanes, if several ranks share the model."""
        self.step_channel: Channel | None = None
        """The decode graphs', if it is not the decode lane's."""
        self.min_free: int | None = None
        """`free_bytes` of the rank that has the fewest, when it is known."""
        self.decoder = gpu_decoder.GpuDecoder(spec, weights, rank, self.tp)
        _check_built(spec, self.tp)
        _check_heads(self.decoder.spec)
        _check_schemes(weights)
        self.spec = spec
        self._settings = settings
        self.device = weights.embedding.device
        torch.cuda.set_device(self.device)
        self.name = f"cuda ({torch.cuda.get_device_name(self.device)})"
        self.itemsize = self.decoder.dtype.itemsize
        self.kv_itemsize = spec.kv_itemsize(settings.kv_cache_dtype, self.itemsize)
        self._kv_dtype = E4M3 if settings.kv_cache_dtype == "fp8" else self.decoder.dtype
        self.page_token_bytes = self.decoder.spec.kv_bytes_per_token(self.kv_itemsize)
        self.page_layout = PageLayout.of(spec, KEY_TILE)
        self.state_bytes = self.decoder.spec.state_bytes(self.itemsize)
        self.weight_itemsize = weights.matrix_itemsize
        self.partitions = self._partitions(settings.levels)
        self.adapters = self._adapter_pool(weights)

    def _adapter_pool(self, weights: Weights) -> GpuAdapterPool | None:
        """Return the pool of LoRA adapters; None if none are served."""
        slots, rank = self._settings.adapter_slots, self._settings.max_lora_rank
        if not slots:
            return None
        if (why := without_adapters(self.spec)) is not None:
            raise FieldError("lora", why)
        shard = self.decoder.shard
        needed, free = pool_bytes(shard, slots, rank, self.itemsize), self.free_bytes()
        if needed > free:
            which = f"{slots} adapters of rank {rank}"
            there = f"and {free / 2**30:.1f} are free"
            raise FieldError("max_loras", f"{which} take {needed / 2**30:.1f} GiB, {there}")
        return GpuAdapterPool(shard, weights, slots, rank)

    def kv_bytes(self, max_model_len: int) -> int:
        """Return the bytes for the KV pool: those left of this process's share of the memory, in
        which the adapters have theirs already."""
        tokens = max(min(max_model_len, WORKSPACE_TOKENS), SIZES[-1])
        shard, meta = self.decoder.shard, torch.device("meta")
        channel = NullChannel(shard.rank, shard.size) if shard.size > 1 else None
        workspace = gpu_decoder.Workspace(shard.local, self.decoder.dtype, meta, channel)
        workspace.reserve(tokens)
        hidden = 3 * tokens * self.spec.hidden_size * self.decoder.dtype.itemsize
        # Pages that prefill attention widens, in both of its workspaces.
        widened = 4 * UNPACKED_TOKENS * self.decoder.spec.kv_size * self.itemsize
        beside = workspace.bytes + hidden + (widened if self._kv_dtype == E4M3 else 0)
        kinds = 1 if self.adapters is None else 2
        return max(0, self.free_bytes() - beside - kinds * GRAPH_BYTES)

    def free_bytes(self) -> int:
        """Return the bytes left of this process's share of the memory and each other rank's."""
        free, total = torch.cuda.mem_get_info(self.device)
        own = int(free - (1 - self._settings.gpu_memory_utilization) * total)
        return own if self.min_free is None else min(own, self.min_free)

    def start(
        self, sizes: LaneSizes, notify: Callable[[], None], progress: OnProgress
    ) -> CudaLanes:
        """Allocate the KV pool, capture the graphs and start the lanes.

        Args:
            sizes: Sizes of the KV pool and of the slots.
            notify: called from a lane's thread whenever a ticket has results.
            progress: called with ("graphs", fraction).
        """
        lanes = self._lanes(*self._launched_runner(sizes, progress), notify)
        progress("warm-up", 0.0)
        self._warm_up(lanes, sizes)
        lanes.do_when_idle(self._graphs_later(lanes.runner))
        return lanes

    def _graphs_later(self, runner: CudaRunner) -> Iterator[Callable[[], None]]:
        """Yield what makes the graphs that the start has left out, a few at a time."""
        steps, passes, partitions = runner.steps, runner.passes, self.partitions
        for kind, graphs, counts, shares in (
            ("bucket", steps, steps.buckets, partitions.decode_units),
            ("size", passes, passes.sizes, partitions.prefill_units),
        ):
            for count in [each for each in counts if each not in graphs.ready]:
                for units in shares:
                    yield partial(graphs.capture_later, partitions, count, units)
                if runner.whole is not None:
                    yield partial(runner.whole.capture_later, **{kind: count})
                yield partial(bisect.insort, graphs.ready, count)

    def _launched_runner(
        self, sizes: LaneSizes, progress: OnProgress
    ) -> tuple[CudaRunner, Launcher]:
        """Return the runner, and the launcher of the one thread that launches: cuBLAS keeps a
        handle and workspaces for each thread."""
        thread = ThreadPoolExecutor(1, "launch", torch.cuda.set_device, (self.device,))
        runner = self._awaited(thread.submit(self.runner, sizes, progress))
        return runner, Launcher(thread)

    def _awaited(self, future: "Future[T]") -> T:
        """Return the result of work that the launching thread does at the start."""
        return future.result()

    def _lanes(
        self, runner: CudaRunner, launcher: Launcher, notify: Callable[[], None]
    ) -> CudaLanes:
        return CudaLanes(runner, self.partitions, launcher, notify)

    def runner(self, sizes: LaneSizes, progress: OnProgress) -> CudaRunner:
        """Allocate the KV pool and capture the graphs, on the thread that is to launch; see
        `start`."""
        decoder, spec = self.decoder, self.decoder.spec
        kernel, why = choose(decoder.dtype, spec.head_dim, self.device)  # may compile it
        log.info("prefill attention: %s (%s)", kernel, why)
        decoder.layout = sizes.layout(spec)
        kv = self.kv_cache(sizes)
        longest, tables = -(-sizes.max_model_len // sizes.page_size), 1 + sizes.window_tables
        known = Slots(sizes.slots, longest, self.device, tables)
        most = min(sizes.max_model_len, WORKSPACE_TOKENS)
        units, channels = self.partitions.units, self.channels
        channel = self.step_channel or channels.get("decode")
        steps = DecodeGraphs(decoder, kv, known, sizes.slots, units, channel, self.adapters)
        runner = self.runner_type(decoder, kv, known, steps, most, units, channels)
        with torch.inference_mode():
            # Ranks capture together, and so all at once.
            first = sizes.graphs_later and not channels and self.decodes and self.prefills
            buckets, counts = (FIRST_BUCKETS, FIRST_SIZES) if first else (None, None)
            if self.decodes:
                half = partial(_part, progress, 0.0)
                steps.capture(self.partitions, half, buckets)
            if self.prefills:
                hybrid = runner.whole if self.decodes else None
                whole = None if hybrid is None else hybrid.capture
                half = partial(_part, progress, 0.5)
                runner.passes.capture(self.partitions, whole, half, counts)
                self.pass_sizes = runner.passes.ready
            else:
                stream = self.partitions.capture_stream("prefill", units)
                runner.passes.load_heads(stream, units, sizes.slots)
        _log_graphs("decode", steps.levels)
        _log_graphs("prefill", runner.passes.levels)
        _reserve_pinned()
        return runner

    def kv_cache(self, sizes: LaneSizes) -> gpu_decoder.GpuKVCache:
        """Allocate the KV pool."""
        spec, pages, page_size = self.decoder.spec, sizes.pages, sizes.page_size
        states = gpu_decoder.GpuStatePool(
            spec, sizes.slots + sizes.snapshots, self.decoder.dtype, self.device
        )
        pool = pages, page_size, self._kv_dtype, self.device
        return gpu_decoder.GpuKVCache(spec, *pool, states=states, layout=self.decoder.layout)

    def _warm_up(self, lanes: CudaLanes, sizes: LaneSizes) -> None:
        """Compile and allocate what prefill and hybrid passes need, so that no request waits for
        it."""
        units, step = self.partitions.units, work.DecodeRow(0, sizes.longest - 1, 1)
        tickets = []
        for whole in self.first_prompts(sizes):
            hybrid = work.HybridWork((step,), whole.rows, whole.chunks, whole.slots)
            tickets.append(lanes.launch("prefill", units, whole, ()))
            tickets.append(lanes.launch("device", units, hybrid, ()))
        # PyTorch keeps memory by stream: each share's gets what the longest of them takes.
        for share in self.partitions.prefill_units:
            layer = work.PrefillWork(0, whole.rows, 0, 1, finishes=True, chunks=whole.chunks)
            tickets.append(lanes.launch("prefill", share, layer, ()))
        self._awaited(lanes.idle())
        for ticket in tickets:
            ticket.check()

    def first_prompts(self, sizes: LaneSizes) -> Iterator[work.PrefillWork]:
        """Prompts that need every form of prefill's kernels, without and with an adapter; the last
        one is the longest. What they write to the pool is written again before it is read."""
        spec, most = self.decoder.spec, sizes.longest
        count = -(-most // sizes.page_size)
        pages = tuple(range(count))
        windows = tuple(
            tuple(range(k * count, (k + 1) * count)) for k in range(1, 1 + sizes.window_tables)
        )
        masks = (work.TokenMask(0, b"\xff" * -(-spec.vocab_size // 8)),)
        kinds = (-1,) if self.adapters is None else (-1, 0)
        for adapter, (reused, new) in product(kinds, warm_up_prompts(spec, most)):
            sampling = work.Sampling(SamplingParams(temperature=0.0), 0, reused + new, ())
            slots = (work.SlotUpdate(0, 0, pages, sampling, adapter, windows),)
            rows, chunks = (
                (work.PromptRow(0, reused, new, samples=True),),
                (work.PromptChunk(work.pack([0] * new)),),
            )
            yield work.PrefillWork(0, rows, 0, spec.layers, True, chunks, slots, masks)

    def _partitions(self, decode_units: Sequence[int] | None) -> GreenContexts:
        try:
            return GreenContexts(self.device.index or 0, decode_units)
        except NoGreenContexts as error:
            if decode_units:
                raise ValueError(f"levels: {error}") from error
            log.warning("no levels, only the whole device: %s", error)
            return GreenContexts(self.device.index or 0, ())


def _part(progress: OnProgress, done: float, stage: str, fraction: float) -> None:
    """Report a part of the second or the first half of what is captured."""
    progress(stage, done + fraction / 2)


def _log_graphs(lane: LaneName, levels: Mapping[int, LevelGraphs | PassGraphs]) -> None:
    for units, graphs in levels.items():
        took = f"{graphs.seconds:.1f} s, after {graphs.tuning_seconds:.1f} s of tuning"
        if graphs.bytes > 0:  # other processes may have freed more than was taken
            took += f"; the device's free memory fell by {graphs.bytes / 2**20:.0f} MiB"
        log.info("%s graphs on %d SMs: %s", lane, units, took)


def _reserve_pinned() -> None:
    """Have PyTorch's allocator of pinned memory keep more blocks than are ever in use.

    Where it lacks one it asks the driver, which may answer when the device is through with what is
    queued (CUDA Programming Guide, Implicit Synchronization).
    """
    sizes = [2**power for power in PINNED_POWERS for _ in range(PINNED_BLOCKS)]
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    del blocks


def warm_up_prompts(spec: ModelSpec, most: int) -> list[tuple[int, int]]:
    """(reused, new) tokens of prompts that need every form of prefill's kernels.

    Attention has tiles for few rows (new tokens times the heads of a group), for some, for many in
    tiles that they do not fill, and for tiles that they do. Each comes without a prefix and with
    the longest: if any tile is split over the SMs, its are, and it reaches beyond any window. The
    last one is for the memory that long ones take.

    Args:
        spec: Spec of the model.
        most: the longest prompt that the pool and the context hold.
    """
    some = {64 // (at.heads // at.kv_heads) for at in spec.each}
    counts = {1, 192, *some, *(count + 1 for count in some)}
    new = sorted({min(count, most) for count in counts})
    prompts = [(reused, count) for count in new for reused in {0, most - count}]
    # Tokens of the longest prompt that is tried at the start.
    return [*prompts, (0, min(most, 8192))]


def _check_schemes(weights: Weights) -> None:
    """Refuse matrices that the products on a GPU are not made for."""
    layers = weights.layers
    products = {(op, m.scheme) for layer in layers for op, m in gpu_decoder.layer_matrices(layer)}
    for operation, scheme in sorted({("logits", weights.head.scheme), *products}):
        if scheme not in SERVED_SCHEMES:
            what = "experts" if operation == "experts" else "matrices"
            raise ValueError(
                f"quantization: {what} stored as {scheme} are not served on a GPU yet; "
                f"these are: {', '.join(SERVED_SCHEMES)}"
            )


def _check_built(spec: ModelSpec, ranks: int) -> None:
    """Refuse what the decoder on a GPU does not compute."""
    if spec.layer_inputs and ranks > 1:  # each layer embeds the tokens, of which a rank has a part
        problem = "inputs of each layer (per-layer embeddings) are served on one GPU"
        raise FieldError("tensor_parallel_size", f"must be 1: {problem}")


def _check_heads(spec: ModelSpec) -> None:
    """Refuse what attention on the GPU is not made for."""
    for at in spec.each:
        _check_shape(at.head_dim, at.heads // at.kv_heads)
    if spec.delta is not None and max(spec.delta.key_dim, spec.delta.value_dim) > 128:
        dims = spec.delta.key_dim, spec.delta.value_dim
        raise ValueError(f"model: linear attention with heads of {dims}; up to 128 are served")


def _check_shape(dim: int, group: int) -> None:
    """Refuse heads of these dimensions, or as many that share a KV head."""
    if dim % 8 or not 16 <= dim <= 512:
        raise ValueError(
            f"model: heads of {dim}; on a GPU multiples of 8 from 16 to 512 are served"
        )
    if group > MAX_GROUP:
        raise ValueError(f"model: {group} heads share a KV head; on a GPU up to {MAX_GROUP} do")
