"""The systems under which the outputs are compared, and scripted ones that cut every prefill."""

from collections.abc import Callable
from dataclasses import dataclass

from twolane.devices import LANES, LaneName
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.plan import Chunk, DecodeSteps, Launch, Plan, PrefillSlice
from twolane.systems.registry import make_system
from twolane.systems.view import View


@dataclass(frozen=True)
class Sliced(System):
    """Prefill in slices that end at the given layers, one at a time; decode steps beside it.

    Each slice takes the next lane and the next number of units on offer, so that the hidden
    states and the KV cache of a batch change hands at every cut. Its memory counts the slices.
    """

    bounds: tuple[int, ...]
    lanes: tuple[LaneName, ...] = ("prefill",)
    batch_tokens: int = 600
    split: bool = False
    """Whether prompts are also cut into chunks of `batch_tokens`."""

    def start(self) -> int:
        return 0

    def plan(self, view: View, memory: int) -> tuple[Plan, int]:
        launches = []
        if view.decoding and not view.lanes["decode"].queued:
            launches.append(Launch("decode", _units(view, 1, memory), DecodeSteps()))
        chunks: tuple[Chunk, ...] = ()
        if view.batch is None and not view.launched_batches:
            chunks = next_chunks(view, self.batch_tokens, split=self.split)
        waits = view.batch is not None and view.batch.layers_done == view.batch.layers_launched
        if chunks or waits:
            first = view.batch.layers_launched if view.batch else 0
            last = min((b for b in self.bounds if b > first), default=view.layers)
            lane = self.lanes[memory % len(self.lanes)]
            side = 1 if lane == "decode" else 0
            launches.append(Launch(lane, _units(view, side, memory), PrefillSlice(first, last)))
            memory += 1
        return Plan(admit=chunks, launches=tuple(launches), reason="sliced"), memory


def _units(view: View, side: int, turn: int) -> int:
    offered = sorted({level[side] for level in view.levels if level[side]})
    return offered[turn % len(offered)]


SYSTEMS: dict[str, Callable[[], System]] = {
    "prefill-first": lambda: make_system("prefill-first", {"max_batch_tokens": "700"}),
    "chunked-48": lambda: make_system("chunked", {"token_budget": "48"}),
    "chunked-640": lambda: make_system("chunked", {"token_budget": "640"}),
    # A slice of no predicted length is one layer.
    "static-split": lambda: make_system(
        "static-split", {"slice_seconds": "0", "max_batch_tokens": "700"}
    ),
    "static-split-k3": lambda: make_system(
        "static-split", {"slice_seconds": "0.004", "look_ahead": "3", "max_batch_tokens": "700"}
    ),
}
"""Those of the project, with settings that make each do all it can on short prompts."""


def schedules(layers: int) -> dict[str, Callable[[], System]]:
    """`SYSTEMS`, a cut after each layer of a model with so many, and cuts after all of them."""
    cuts = {f"cut-{c}": lambda c=c: Sliced((c,)) for c in range(1, layers)}
    every = tuple(range(1, layers))
    return {
        **SYSTEMS,
        **cuts,
        "every-layer": lambda: Sliced(every, LANES, batch_tokens=230, split=True),
    }
