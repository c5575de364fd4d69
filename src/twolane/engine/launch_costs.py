"""What launches cost the host: plans leave room for it.

On an H200 a launch of a hybrid pass takes 1.2 ms behind another one and 1.5 after other work, 1.6
and 3 one time in ten; one of a decode step 0.5. Which of them comes next is known when it is
planned, and then it may be late: so each lane is fed as early as the dearest kind of launch that it
may get wants it.
"""

from collections import deque

from twolane.common.vocabulary import LaneName
from twolane.systems.plan import DecodeSteps, Hybrid, PrefillSlice, Work

KINDS: dict[LaneName, tuple[type[Work], ...]] = {
    "prefill": (PrefillSlice,),
    "decode": (DecodeSteps,),
    "device": (PrefillSlice, DecodeSteps, Hybrid),
}
"""What may be launched in a lane."""
SLICE_SECONDS = 0.003
"""Of the host for one slice while others decode: less than what is queued for decode ahead of time
(`lead_seconds`)."""
ENDS = 2
"""Times as much may the slices take that lay out a batch, or sample after it."""
FADING = 0.9
"""What is left of the longest launch of a kind after another one of that kind."""
HALF_LIFE = 1.0
"""Seconds in which half of what it took longer than usual is forgotten at any rate: else a kind
that is no longer planned for, because it took too long once, would not be again."""
USUAL_OF = 9
"""Last launches of a kind of whose costs the median is usual, if there were half as many. That is
remembered, for the first pass after a while without any takes no less than others; but half of it
is forgotten every `USUAL_HALF_LIFE`, as of stalls that are over."""
USUAL_HALF_LIFE = 60.0
"""Seconds."""


class LaunchCosts:
    """Learns from launches that have ended.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._longest: dict[tuple[type[Work], bool], float] = {}
        self._costs: dict[tuple[type[Work], bool], deque[float]] = {}
        self._usual: dict[tuple[type[Work], bool], float] = {}
        self._noted = 0.0
        self._last: type[Work] = DecodeSteps
        self.layers_at_once = layers
        """Of a slice, that the host launches in `SLICE_SECONDS`; at least one."""
        self.longest: dict[LaneName, float] = dict.fromkeys(KINDS, 0.0)
        """Seconds of the longest launch of late, of those that a lane may get."""

    def note(self, work: Work, seconds: float, now: float) -> None:
        """Of a launch: what the host took for it."""
        kind, passed = self._kind(work, again=self._last is Hybrid), now - self._noted
        self._noted, self._last = now, type(work)
        left, usual_left = 0.5 ** (passed / HALF_LIFE), 0.5 ** (passed / USUAL_HALF_LIFE)
        for each, usual in self._usual.items():
            self._usual[each] = usual = usual_left * usual
            self._longest[each] = usual + left * max(0.0, self._longest[each] - usual)
        costs = self._costs.setdefault(kind, deque(maxlen=USUAL_OF))
        costs.append(seconds)
        enough = 2 * len(costs) > USUAL_OF
        self._usual[kind] = usual = sorted(costs)[len(costs) // 2] if enough else 0.0
        self._longest[kind] = max(seconds, usual, FADING * self._longest.get(kind, 0.0))
        for lane, kinds in KINDS.items():
            known = [most for (each, _), most in self._longest.items() if each in kinds]
            self.longest[lane] = max(known, default=0.0)
        if isinstance(work, PrefillSlice):
            self._note_slice(work, seconds)

    def seconds(self, work: Work, *, again: bool = False) -> float:
        """Of the longest launch of such work of late; 0.0: there was none.

        `again`: a hybrid pass behind another one.
        """
        kinds = self._kind(work, again), self._kind(work, not again)
        return next((self._longest[kind] for kind in kinds if kind in self._longest), 0.0)

    def _kind(self, work: Work, again: bool) -> tuple[type[Work], bool]:
        """Slices that lay out a batch, or sample after it, are a kind of their own; so are passes
        behind passes."""
        if isinstance(work, PrefillSlice):
            return PrefillSlice, not work.first or work.last == self._layers
        return type(work), again and isinstance(work, Hybrid)

    def _note_slice(self, work: PrefillSlice, seconds: float) -> None:
        """As many layers as fill the time, at most twice and at least half as many as were seen.

        Not so many as their mean cost tells: what a slice costs beside its layers, or had to wait
        for, would be held against them, the more, the shorter slices are. What the ends' own time
        leaves is no measure for slices between them; if an end has half the layers, there are none.
        """
        layers, (_, ends) = work.last - work.first, self._kind(work, again=False)
        fitting = layers * SLICE_SECONDS * (ENDS if ends else 1) / max(seconds, 1e-9)
        if fitting < layers:
            self.layers_at_once = max(1, layers // 2, int(fitting))
        elif layers >= self.layers_at_once and (not ends or 2 * layers >= self._layers):
            more = int(min(2 * layers, fitting))
            self.layers_at_once = min(self._layers, more if ends else max(layers + 1, more))
