"""Messages from the process that computes prompts to the one that decodes: ends of slices."""

import os
import threading
from queue import SimpleQueue

import msgspec
import torch
from torch import Tensor

from twolane.parallel.group import RankLost

LENGTH_BYTES = 8
"""Bytes, little-endian, of the length before each arrival."""


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """The end of layers of a prefill batch, of which every key and value has been pushed."""

    batch: int
    last: int
    """The layer after the last one that was computed."""
    hidden: bytes = b""
    """Hidden states after the model's last layer, of the rows that are sampled or scored."""

    @classmethod
    def of(cls, batch: int, last: int, hidden: Tensor | None) -> "Arrival":
        """Return an arrival with these hidden states, [R, hidden], or none."""
        if hidden is None:
            return cls(batch, last)
        return cls(batch, last, hidden.contiguous().view(torch.uint8).numpy().tobytes())

    def rows(self, width: int, dtype: torch.dtype) -> Tensor:
        """Return the hidden states as a tensor [R, width]."""
        if not self.hidden:
            return torch.empty((0, width), dtype=dtype)
        return torch.frombuffer(bytearray(self.hidden), dtype=dtype).view(-1, width)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Arrival)


def send_arrival(file: int, arrival: Arrival) -> None:
    """Write an arrival to the pipe; waits for its reader.

    Raises:
        BrokenPipeError: the reader has ended.
    """
    encoded = _encode(arrival)
    rest = memoryview(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
    while rest:
        rest = rest[os.write(file, rest) :]


class Arrivals:
    """Reads the pipe's other end, on a thread of its own, which ends with the writer.

    Args:
        file: the pipe; it is closed at its end.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._arrived: SimpleQueue[Arrival | None] = SimpleQueue()
        threading.Thread(target=self._read, name="arrivals", daemon=True).start()

    def take(self, batch: int, last: int) -> Arrival:
        """Wait for the next arrival, which must be that of these layers.

        Raises:
            RankLost: there will be no more.
            ValueError: it is another one.
        """
        if (arrival := self._arrived.get()) is None:
            self._arrived.put(None)  # for the next call
            raise RankLost("rank 0 of 2 waited in vain for the pages of rank 1")
        if (arrival.batch, arrival.last) != (batch, last):
            raise ValueError(
                f"layers up to {arrival.last} of batch {arrival.batch} have arrived where those up "
                f"to {last} of batch {batch} are due"
            )
        return arrival

    def _read(self) -> None:
        with os.fdopen(self._file, "rb") as pipe:
            while len(head := pipe.read(LENGTH_BYTES)) == LENGTH_BYTES:
                length = int.from_bytes(head, "little")
                if len(encoded := pipe.read(length)) < length:
                    break
                self._arrived.put(_decoder.decode(encoded))
        self._arrived.put(None)
