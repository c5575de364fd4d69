"""Sums on a stream of their own, beside what the lane's stream computes meanwhile."""

import torch
from torch import Tensor

from twolane.parallel.channel import Channel


class SideSums:
    """The sums of two halves of a pass, in the order in which they are begun.

    The stream has the lane's share of the SMs. It waits for the lane's stream before each sum, and
    the lane's stream for both halves before its pass ends: so still at most one collective of the
    channel is under way, and all ranks that begin the same sums run them in the same order.

    Args:
        channel: of the lane.
        stream: where sums run.
    """

    def __init__(self, channel: Channel, stream: torch.cuda.Stream) -> None:
        self._channel, self._stream = channel, stream
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ended = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def begin(self, half: int, partial: Tensor) -> None:
        """Sum over all ranks, in place, what the current stream has computed for this half."""
        self._ready.record()
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            self._channel.all_reduce(partial)
            self._ended[half].record(self._stream)

    def wait(self, half: int) -> None:
        """Have the current stream wait for the last sum of this half."""
        self._ended[half].wait()
