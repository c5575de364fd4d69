"""Groups of ranks and their collectives. Every lane has a channel of its own."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from twolane.devices import LaneName

LOOPBACK = "127.0.0.1"
"""Address at which ranks of one host connect to each other."""
COLLECTIVE_TIMEOUT_SECONDS = 600.0
"""A collective fails when another rank has not come to it after this many seconds. Rank 0 holds a
rank for lost long before: it knows how long a launch should take."""
MEETING_SECONDS = 0.02
"""Seconds between two looks whether all ranks have loaded."""
CONNECT_SECONDS = 60.0
"""Seconds in which all ranks, once each has loaded, must have connected a channel."""
CHANNELS: Mapping[LaneName, str] = {"prefill": "prefill", "decode": "decode", "device": "prefill"}
"""The channel of each lane; the whole device excludes both lanes and uses the prefill lane's."""


T = TypeVar("T")


class RankLost(ConnectionError):
    """A rank has died or stands still; the message names it, or the rank that waited for it."""


class Group(Protocol):
    """The ranks that share a model.

    All ranks call the same collectives of a channel in the same order; a thread uses the channel
    that it was bound to.
    """

    rank: int
    size: int

    def bind(self, lane: LaneName) -> None:
        """Have this thread use that lane's channel from now on."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks, added in rank order, so that its bits are the same."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor; the others' give its shape and type."""

    def gather_columns(self, part: Tensor) -> Tensor:
        """Return all ranks' columns [R, size * columns] on rank 0, and `part` on the others."""


class SingleRank:
    """A group of one rank."""

    rank = 0
    size = 1

    def bind(self, lane: LaneName) -> None:
        """See `Group.bind`."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See `Group.all_reduce`."""
        return partial

    def broadcast(self, tensor: Tensor) -> Tensor:
        """See `Group.broadcast`."""
        return tensor

    def gather_columns(self, part: Tensor) -> Tensor:
        """See `Group.gather_columns`."""
        return part


class CpuGroup:
    """Ranks that are processes of one host, by gloo; a rank that waits sleeps.

    Args:
        rank: this process's, from 0.
        size: number of ranks.
        store: The store at which the ranks meet.
        check: called while others have not come; raises if they will not.

    Raises:
        RankLost: a collective: a rank has died, or has not come within
            `COLLECTIVE_TIMEOUT_SECONDS`.
    """

    def __init__(
        self, rank: int, size: int, store: dist.Store, check: Callable[[], None] = lambda: None
    ) -> None:
        self.rank, self.size = rank, size
        meet(rank, size, store, check)
        self._channels = {
            name: connected(name, rank, size, store, check, partial(gloo, rank, size))
            for name in sorted(set(CHANNELS.values()))
        }
        self._bound = threading.local()

    def bind(self, lane: LaneName) -> None:
        """See `Group.bind`."""
        self._bound.name = CHANNELS[lane]
        self._bound.channel = self._channels[CHANNELS[lane]]

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See `Group.all_reduce`."""
        partial = partial.contiguous()
        first, *others = parts = [torch.empty_like(partial) for _ in range(self.size)]
        with self._waiting():
            self._bound.channel.allgather([parts], [partial]).wait()
        for part in others:
            first += part
        return first

    def broadcast(self, tensor: Tensor) -> Tensor:
        """See `Group.broadcast`."""
        with self._waiting():
            self._bound.channel.broadcast([tensor]).wait()
        return tensor

    def gather_columns(self, part: Tensor) -> Tensor:
        """See `Group.gather_columns`."""
        part = part.contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        with self._waiting():
            self._bound.channel.gather([parts] if parts else [], [part], options).wait()
        return torch.cat(parts, dim=1) if parts else part

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size} did not hear from the others in the "
                f"{self._bound.name} channel: {str(error).splitlines()[0]}"
            ) from error


def meeting_place() -> dist.TCPStore:
    """Return a store for the ranks of this host, which no other host can reach.

    PyTorch's own socket listens on every address of the host, and whoever connects may change what
    the ranks tell each other.
    """
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port = listener.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def meeting_at(port: int) -> dist.TCPStore:
    """Connect to the store of the ranks of this host that another process has made."""
    return dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)


def meet(
    rank: int, size: int, store: dist.Store, check: Callable[[], None], note: str = ""
) -> list[str]:
    """Wait until all ranks are here.

    Args:
        rank: this process's, from 0.
        size: number of ranks.
        store: The store at which the ranks meet.
        check: called while others have not come; raises if they will not.
        note: A text that the other ranks receive.

    Returns:
        The notes of all ranks, by rank.
    """
    store.set(f"rank-{rank}", note)
    names = [f"rank-{other}" for other in range(size)]
    while not store.check(names):
        check()
        time.sleep(MEETING_SECONDS)
    return [store.get(name).decode() for name in names]


def connected(
    name: str,
    rank: int,
    size: int,
    store: dist.Store,
    check: Callable[[], None],
    connect: Callable[[dist.Store], T],
) -> T:
    """Make a channel, which blocks until all ranks do so.

    Args:
        name: Name of the channel.
        rank: this process's, from 0.
        size: number of ranks.
        store: The store at which the ranks meet; `connect` gets a part of it.
        check: called while others have not come; raises if they will not.
        connect: makes the channel; it may block for ever, on a thread that is not joined.

    Raises:
        RankLost: another rank has not made it within `CONNECT_SECONDS`; the message names it.
    """
    own = dist.PrefixStore(name, store)
    meet(rank, size, own, check)
    begun, keys = time.monotonic(), [f"made-{other}" for other in range(size)]

    def waiting() -> None:
        check()
        if time.monotonic() - begun > CONNECT_SECONDS:
            missing = [n for n, key in enumerate(keys) if n != rank and not own.check([key])]
            raise RankLost(
                f"rank {rank} of {size} has waited {CONNECT_SECONDS:.0f} s for "
                f"{'rank ' + ', '.join(map(str, missing)) if missing else 'the others'} to "
                f"connect the {name} channel"
            )

    theirs = own.clone()  # a client that waits keeps others out
    made = meanwhile(lambda: connect(theirs), waiting)
    own.set(keys[rank], "")
    return made


def meanwhile(run: Callable[[], T], waiting: Callable[[], None]) -> T:
    """Run what may block for ever on a thread of its own, and call `waiting` until it has ended.

    Raises:
        BaseException: what either of them raises; the thread may go on running.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="ranks-meanwhile", daemon=True).start()
    return awaited(future, waiting)


def awaited(future: "Future[T]", waiting: Callable[[], None]) -> T:
    """Return the future's result; `waiting` is called until it is there, and may raise."""
    while not wait([future], MEETING_SECONDS).done:
        waiting()
    return future.result()


def gloo(rank: int, size: int, store: dist.Store) -> dist.ProcessGroupGloo:
    """Connect to the other ranks of this host."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    return dist.ProcessGroupGloo(store, rank, size, options)
