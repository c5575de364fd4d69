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
from twolane.model.decoder import Weights
from twolane.model.gpu import GpuDecoder, GpuKVCache, Workspace
from twolane.model.spec import ModelSpec

log = logging.getLogger("twolane.cuda")

WORKSPACE_TOKENS = 16_384
"""Prefill batches that the workspace is made for; a longer prompt makes it grow."""
GRAPH_BYTES = 2 * 2**30
"""Kept free for the graphs of all levels, which are captured when the KV pool exists."""


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
        return CudaLanes(runner, self.partitions, notify)

    def _partitions(self, decode_units: Sequence[int] | None) -> Partitions:
        try:
            return Partitions(self.device.index or 0, decode_units)
        except NoGreenContexts as error:
            if decode_units:
                raise ValueError(f"levels: {error}") from error
            log.warning("no levels, only the whole device: %s", error)
            return Partitions(self.device.index or 0, ())
