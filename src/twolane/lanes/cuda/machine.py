"""A GPU made ready to serve: weights, levels, KV pool, decode graphs, lanes."""

import logging
from collections.abc import Callable, Sequence

import torch

from twolane.kernels.prefill_attention import choose
from twolane.lanes.cuda.decode import DecodeSteps
from twolane.lanes.cuda.green import NoGreenContexts, Partitions
from twolane.lanes.cuda.lanes import CudaLanes
from twolane.lanes.cuda.runner import CudaRunner
from twolane.lanes.cuda.slots import Slots
from twolane.lanes.work import PrefillState, PrefillWork, PromptRow, Sampling
from twolane.model.decoder import Weights
from twolane.model.gpu import GpuDecoder, GpuKVCache, Workspace
from twolane.model.spec import ModelSpec
from twolane.sampling import SamplingParams

log = logging.getLogger("twolane.cuda")

WORKSPACE_TOKENS = 16_384
"""Prefill batches that the workspace is made for; a longer prompt makes it grow."""
GRAPH_BYTES = 2 * 2**30
"""Kept free for the graphs of all levels, which are captured when the KV pool exists."""


WARM_UP = ((0, 1), (0, 7), (0, 16), (0, 61), (0, 640), (64, 1), (64, 5), (64, 40), (640, 256))
"""(reused, new) tokens of the prompts that compile prefill's kernels at the start."""


class CudaMachine:
    """One GPU with a model on it.

    Args:
        spec: the model's shape.
        weights: on the device.
        decode_units: SMs of the decode lane, one level each; None: every 16.
        utilization: share of the device's memory that this process may take.

    Raises:
        ValueError: a level cannot be had.
    """

    page_sizes: Sequence[int] = (32, 16, 64)

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        decode_units: Sequence[int] | None = None,
        utilization: float = 0.9,
    ) -> None:
        self.spec = spec
        self._utilization = utilization
        self.decoder = GpuDecoder(spec, weights)
        self.device = weights.embedding.device
        torch.cuda.set_device(self.device)
        self.name = f"cuda ({torch.cuda.get_device_name(self.device)})"
        self.page_token_bytes = spec.kv_bytes_per_token(self.decoder.dtype.itemsize)
        self.partitions = self._partitions(decode_units)

    def kv_bytes(self, max_model_len: int) -> int:
        """Bytes for the KV pool: what is left of this process's share of the memory."""
        free, total = torch.cuda.mem_get_info(self.device)
        tokens = min(max_model_len, WORKSPACE_TOKENS)
        workspace = Workspace(self.spec, self.decoder.dtype, torch.device("meta"))
        workspace.reserve(tokens)
        hidden = 2 * tokens * self.spec.hidden_size * self.decoder.dtype.itemsize
        left = int(free - (1 - self._utilization) * total)
        return max(0, left - workspace.bytes - hidden - GRAPH_BYTES)

    def start(
        self,
        pages: int,
        page_size: int,
        slots: int,
        max_model_len: int,
        notify: Callable[[], None],
        progress: Callable[[str, float], None],
    ) -> CudaLanes:
        """Allocate the KV pool, capture the decode graphs and start the lanes.

        Args:
            pages: of the KV pool.
            page_size: tokens in a page.
            slots: the most requests at a time.
            max_model_len: the most tokens of one request.
            notify: called from a lane's thread whenever a ticket has news.
            progress: told ("graphs", fraction).
        """
        decoder, spec = self.decoder, self.spec
        kernel, why = choose(decoder.dtype, spec.head_dim, self.device)  # may compile it
        log.info("prefill attention: %s (%s)", kernel, why)
        kv = GpuKVCache(spec, pages, page_size, decoder.dtype, self.device)
        known = Slots(slots, -(-max_model_len // page_size), self.device)
        steps = DecodeSteps(decoder, kv, known, slots, self.partitions.units)
        with torch.inference_mode():
            steps.capture(self.partitions, lambda done: progress("graphs", done))
        for units, graphs in steps.levels.items():
            log.info(
                "decode graphs on %d SMs: %.0f MiB, %.1f s",
                units,
                graphs.bytes / 2**20,
                graphs.seconds,
            )
        runner = CudaRunner(decoder, kv, known, steps, min(max_model_len, WORKSPACE_TOKENS))
        lanes = CudaLanes(runner, self.partitions, notify)
        progress("kernels", 0.0)
        self._warm_up(lanes, min(pages, known.tables.shape[1]) * page_size)
        return lanes

    def _warm_up(self, lanes: CudaLanes, most: int) -> None:
        """Compile what prefill runs, so that no request waits for it.

        Kernels have forms for few and many tokens, for one and several, with and without a prefix.
        What is written to the pool here is written again before it is read.
        """
        pages = list(range(-(-most // lanes.runner.kv.page_size)))
        greedy = SamplingParams(temperature=0.0)
        for reused, new in WARM_UP:
            if reused + new <= most:
                tokens = [0] * new
                sampling = Sampling(greedy, 0, reused + new, (), tokens)
                row = PromptRow(0, reused, tokens, pages, sampling)
                work = PrefillWork(PrefillState(), (row,), 0, self.spec.layers, finishes=True)
                lanes.launch("prefill", self.partitions.units, work, ())
        torch.cuda.synchronize(self.device)

    def _partitions(self, decode_units: Sequence[int] | None) -> Partitions:
        try:
            return Partitions(self.device.index or 0, decode_units)
        except NoGreenContexts as error:
            if decode_units:
                raise ValueError(f"levels: {error}") from error
            log.warning("no levels, only the whole device: %s", error)
            return Partitions(self.device.index or 0, ())
