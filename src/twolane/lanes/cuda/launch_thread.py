"""The launch thread: it launches in the order of the calls, but decode steps pass prefill slices.

Launching the first slice of a batch takes the host 3 to 7 ms, hardly less than a decode step takes
the device, so a step after it would begin late. Steps are therefore launched before slices that
wait for this thread, and between two layers of the slice under way.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

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
