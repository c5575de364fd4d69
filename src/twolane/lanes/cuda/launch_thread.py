"""The thread that launches: in the order of the calls, but for decode steps and prefill slices.

The slice that begins a batch takes the host 3 to 7 ms, and a decode step hardly lasts longer on the
device: one that had to wait for such a slice would begin late. So it goes before slices that wait
for this thread, and between two layers of the one that is being launched.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

Turn = Literal["step", "slice", "in order"]
"""What a launch is: a step goes before slices, everything else where it was asked for."""


class _Asked(NamedTuple):
    launch: Callable[[], None]
    turn: Turn


class Launcher:
    """Launches on one thread.

    Args:
        thread: it alone; also of whatever else needs to run there.
    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.thread = thread
        self._waiting: deque[_Asked] = deque()
        """Others only append."""

    def submit(self, launch: Callable[[], None], turn: Turn) -> None:
        """Launch it when it is its turn; a step must need nothing of what was asked for before it
        and was not launched yet."""
        self._waiting.append(_Asked(launch, turn))
        self.thread.submit(self._next)

    def between(self) -> None:
        """Launch the steps that wait; called by slices, where a step's launch changes nothing."""
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
        """The place of the first one, if only slices wait before it."""
        for place in range(len(self._waiting)):
            turn = self._waiting[place].turn
            if turn != "slice":
                return place if turn == "step" else None
        return None
