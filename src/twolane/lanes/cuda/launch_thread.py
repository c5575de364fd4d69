"""The launch thread: it launches in the order of the calls, but decode steps pass prefill slices.

Launching the first slice of a batch takes the host 3 to 7 ms, hardly less than a decode step takes
the device, so a step after it would begin late. Steps are therefore launched before slices that
wait for this thread, and between two layers of the slice under way.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch

from twolane.common.garbage import gc_disabled

log = logging.getLogger("twolane.cuda")

LOOK_SECONDS = 0.05
"""Seconds between two looks at whether anything runs."""

Turn = Literal["step", "slice", "in order"]
"""Place of a launch in the order: a step passes slices, everything else keeps its place."""


class _Asked(NamedTuple):
    launch: Callable[[], None]
    turn: Turn


class Launcher:
    """Runs launches on one thread.

    Args:
        thread: an executor with one thread, which other work on the device shares.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.thread = thread
        self._waiting: deque[_Asked] = deque()
        """Launches in the order of the calls; other threads only append."""

    def submit(self, launch: Callable[[], None], turn: Turn) -> None:
        """Queue a launch for the thread; a step must not depend on launches that wait there."""
        self._waiting.append(_Asked(launch, turn))
        self.thread.submit(self._next)

    @property
    def idle(self) -> bool:
        """Whether no launch waits for the thread."""
        return not self._waiting

    def between(self) -> None:
        """Launch the waiting steps; slices call this where a step may be launched between
        layers."""
        while (place := self._step()) is not None:
            self._take(place)

    def _next(self) -> None:
        if self._waiting:  # or it went between
            self._take(self._step() or 0)

    def _take(self, place: int) -> None:
        launch = self._waiting[place].launch
        del self._waiting[place]
        launch()

    def _step(self) -> int | None:
        """Return the index of the first waiting step if only slices wait before it, else None."""
        for place in range(len(self._waiting)):
            turn = self._waiting[place].turn
            if turn != "slice":
                return place if turn == "step" else None
        return None


class IdleWork:
    """Work for the launching thread that must not run beside any launch.

    Args:
        launcher: The launches that wait for the thread.
        waiting: Returns the launches that the device has not finished.
        pieces: The work, in pieces of some ten milliseconds.
    """

    def __init__(
        self,
        launcher: Launcher,
        waiting: Callable[[], Sequence[object]],
        pieces: Iterator[Callable[[], None]],
    ) -> None:
        self._launcher, self._waiting, self._pieces = launcher, waiting, pieces
        self._calm = False
        """Whether nothing ran at the last look."""

    def run(self) -> None:
        """Run all pieces; end with the thread, or at an error, which is logged."""
        begun = time.monotonic()
        while True:
            try:
                piece = self._launcher.thread.submit(self._look).result()
            except RuntimeError:  # the thread was shut down, or a piece failed
                log.exception("graphs are left out; passes and steps are padded to others")
                return
            if piece is None:
                time.sleep(LOOK_SECONDS)
            elif not piece:
                took = time.monotonic() - begun
                log.info("captured the rest of the graphs while idle, %.1f s after the start", took)
                return

    def _look(self) -> bool | None:
        """Run the next piece if nothing runs now or did at the last look; return None if something
        does, else whether there was another piece."""
        calm = self._launcher.idle and not self._waiting()
        self._calm, before = calm, self._calm
        if not calm or not before:
            return None
        piece = next(self._pieces, None)
        if piece is None:
            return False
        with gc_disabled(), torch.inference_mode():  # see `DecodeGraphs.capture`
            piece()
        return True
