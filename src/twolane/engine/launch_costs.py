"""The host's seconds for each kind of launch, so that plans leave time for launching.

Work must be launched before its lane runs dry, and a launch may take the host longer than a decode
step takes the device. So each lane is fed as early as its slowest kind of launch requires.
"""

from twolane.devices import LaneName
from twolane.systems.plan import DecodeSteps, Hybrid, PrefillSlice, Work

KINDS: dict[LaneName, tuple[type[Work], ...]] = {
    "prefill": (PrefillSlice,),
    "decode": (DecodeSteps,),
    "device": (PrefillSlice, DecodeSteps, Hybrid),
}
"""The kinds of work that each lane may get."""
HALF_LIFE_SECONDS = 1.0
"""A remembered maximum halves in this many seconds, so that one stall does not keep a kind of
launch out of plans for long."""
SLICE_SECONDS = 0.003
"""The host may take this many seconds to launch a prefill slice: less than what is queued for
decode ahead of time (`lead_seconds`)."""
END_FACTOR = 2
"""Slices that lay out a batch, or sample after it, may take this many times `SLICE_SECONDS`."""


class LaunchCosts:
    """The decayed maximum of the host's seconds for each kind of launch.

    Args:
        layers: layers of the model.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._longest: dict[tuple[type[Work], bool], float] = {}
        self._noted = 0.0
        self.layers_at_once = layers
        """Largest number of layers of a slice that the host launches in `SLICE_SECONDS`; at least
        1."""
        self.longest: dict[LaneName, float] = dict.fromkeys(KINDS, 0.0)
        """The decayed maximum, in seconds, over the kinds of launches that each lane may get."""

    def note(self, work: Work, seconds: float, now: float) -> None:
        """Learn that a launch took the host `seconds`."""
        left, self._noted = 0.5 ** ((now - self._noted) / HALF_LIFE_SECONDS), now
        for each in self._longest:
            self._longest[each] *= left
        kind = self._kind(work)
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        for lane, kinds in KINDS.items():
            known = [most for (each, _), most in self._longest.items() if each in kinds]
            self.longest[lane] = max(known, default=0.0)
        if isinstance(work, PrefillSlice):
            self._fit_slices(work, seconds)

    def seconds(self, work: Work) -> float:
        """Return the decayed maximum for such a launch, in seconds; 0.0 if there was none."""
        return self._longest.get(self._kind(work), 0.0)

    def _kind(self, work: Work) -> tuple[type[Work], bool]:
        """Return the kind of a launch; slices at a batch's ends are a kind of their own."""
        ends = isinstance(work, PrefillSlice) and (not work.first or work.last == self._layers)
        return type(work), ends

    def _fit_slices(self, work: PrefillSlice, seconds: float) -> None:
        """Fit `layers_at_once` to a slice's seconds, in steps of at most a factor of two.

        The mean seconds of a layer would not do: a slice has a fixed cost, so short slices would
        become ever shorter. A slice at a batch's end raises the number only if it has half of the
        layers, since then there are no slices between the ends.
        """
        layers, (_, ends) = work.last - work.first, self._kind(work)
        fitting = layers * SLICE_SECONDS * (END_FACTOR if ends else 1) / max(seconds, 1e-9)
        if fitting < layers:
            self.layers_at_once = max(1, layers // 2, int(fitting))
        elif layers >= self.layers_at_once and (not ends or 2 * layers >= self._layers):
            more = int(min(2 * layers, fitting))
            self.layers_at_once = min(self._layers, more if ends else max(layers + 1, more))
