"""Where launching takes the host long, plans leave room for it: no lane runs dry meanwhile."""

import itertools
from collections.abc import Sequence

from tests.systems.simulation import LAYERS, LEVELS, UNITS, Simulation, simulate, submit
from twolane.lanes import Ticket
from twolane.lanes.sim import FixedDurations, SimLanes
from twolane.lanes.work import DecodeWork, PrefillWork, Work
from twolane.systems import make_system
from twolane.systems.plan import PrefillSlice
from twolane.vocabulary import LaneName

STEP, LAYER, HYBRID = 0.010, 0.006, 0.030


class SlowHost(FixedDurations):
    """Launching a layer takes the host 3 ms: half as long as the layer."""

    def host_seconds(self, work: Work) -> tuple[float, float]:
        if isinstance(work, DecodeWork):
            return 0.0, 0.0
        layers = work.last - work.first if isinstance(work, PrefillWork) else LAYERS
        return 0.003 * layers, 0.003 * layers


class SilentLanes(SimLanes):
    """Lanes whose tickets do not say what launching took."""

    def launch(self, lane: LaneName, units: int, work: Work, after: Sequence[Ticket]) -> Ticket:
        ticket = super().launch(lane, units, work, after)
        ticket.launching = 0.0
        return ticket


def gaps(sim: Simulation, name: str) -> list[float]:
    """After the first few: they may be learned from."""
    return [b - a for a, b in itertools.pairwise(sim.times[name])][10:]


def served(kind: type[SimLanes], system: str, **options: str) -> Simulation:
    arrivals = [(0.0, submit("long", 20, 200))]
    arrivals += [(0.05 + 0.2 * i, submit(f"p{i}", 100 + i, 2)) for i in range(8)]
    durations = SlowHost(prefill_layer=LAYER, decode_step=STEP, hybrid=HYBRID)
    return simulate(make_system(system, options), arrivals, lanes=kind(UNITS, LEVELS, durations))


def test_decode_does_not_wait_for_a_slice_to_be_launched() -> None:
    assert max(gaps(served(SilentLanes, "static-split"), "long")) > 2.0 * STEP
    assert max(gaps(served(SimLanes, "static-split"), "long")) < 1.5 * STEP


def test_a_hybrid_pass_is_launched_while_the_one_before_it_runs() -> None:
    def spare(kind: type[SimLanes]) -> float:
        """Seconds between hybrid passes that follow one another."""
        ran = served(kind, "chunked", token_budget="32").record.of("device")
        pairs = [(a, b) for a, b in itertools.pairwise(ran) if a.tokens > 2 and b.tokens > 2]
        return sum(b.start - a.end for a, b in pairs) / len(pairs)

    assert spare(SilentLanes) > 0.4 * HYBRID
    assert spare(SimLanes) < 0.2 * spare(SilentLanes)


def test_what_launching_takes_is_forgotten() -> None:
    """One launch that compiled a kernel does not make the rest come early, or in single layers."""
    sim = served(SimLanes, "static-split")
    state = sim.engine.state
    assert state.layers_at_once == 1
    for _ in range(50):
        state.note_launching(Ticket("prefill", UNITS, launching=1e-5), PrefillSlice(0, LAYERS))
    assert state.layers_at_once == LAYERS
    assert state.launching["prefill"] < 1e-3
