"""The process that computes prompts where prefill and decode have devices of their own.

It is rank 1 of two: `python -m twolane.lanes.disaggregated.cpu_prefill`. See `lanes.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from twolane.lanes.base import Step
from twolane.lanes.cpu.runner import AwaitMasks, Runner, no_late_masks
from twolane.lanes.disaggregated.arrivals import Arrival, send_arrival
from twolane.lanes.disaggregated.cpu_mirror import MirroredKVCache
from twolane.lanes.disaggregated.shared_memory import SharedMemory
from twolane.lanes.ranks.cpu_follower import follow
from twolane.lanes.ranks.log_reader import read_sizes, read_start, reporting_failure
from twolane.lanes.sampling_points import SamplingPoints
from twolane.lanes.settings import load_shard
from twolane.lanes.work import PrefillWork, Work
from twolane.model.decoder import Decoder
from twolane.model.lora import AdapterPool
from twolane.parallel.group import meet, meeting_at


class PromptRunner(Runner):
    """Runs slices of prompts, and tells the other process when their pages have been pushed."""

    arrivals: int
    """The pipe to the other process, which is set before anything runs."""
    _ends: Tensor | None = None
    """Last hidden states of the current batch that the other process samples or scores from."""

    def run(self, work: Work, masks: AwaitMasks = no_late_masks) -> Iterator[Step]:
        """See `Runner.run`; nothing is sampled."""
        assert isinstance(work, PrefillWork)
        yield from super().run(work, masks)
        ends, self._ends = self._ends, None
        send_arrival(self.arrivals, Arrival.of(work.batch, work.last, ends))

    def _finish(self, hidden: Tensor, ends: SamplingPoints) -> Step:
        self._ends = hidden[ends.needed, : self._decoder.spec.hidden_size]
        return Step()


def main() -> None:
    """Compute prompts until the log ends."""
    start = read_start()
    torch.set_num_threads(1)  # for loading, beside the other process; the lane sets its own
    settings = start.settings
    ours, theirs, arrivals = start.files
    with reporting_failure(start):
        spec, weights = load_shard(settings, "cpu", lambda *_: None)
    store = meeting_at(start.port)
    meet(start.rank, settings.ranks, store, lambda: None)
    sizes = read_sizes()
    decoder = Decoder(spec, weights)
    memories = SharedMemory(ours), SharedMemory(theirs)
    rounded = settings.kv_cache_dtype == "fp8"
    shape = spec, sizes.pages, sizes.page_size, decoder.dtype
    kv = MirroredKVCache(*shape, memories, rounded=rounded, layout=sizes.layout(spec))
    adapters = AdapterPool(weights, settings.adapter_slots, settings.max_lora_rank)
    runner = PromptRunner(decoder, kv, sizes.slots, adapters)
    runner.arrivals = arrivals
    follow(runner, start)


if __name__ == "__main__":
    main()
