"""What the engine costs by requests: `python -m tests.engine.scaling [--systems auto ...]`.

As many requests decode as wait, on a simulated H200, whose own work is not counted. Times are the
processor's, of this thread: microseconds for each token of launching, reaping and reporting decode
steps, and milliseconds of the system's plans for each launch.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from twolane.common.garbage import gc_disabled
from twolane.engine.build import assemble
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Submit
from twolane.sampling import SamplingParams
from twolane.sim.gpus import GPUS
from twolane.sim.lanes import SimLanes
from twolane.sim.machine import SimulatedMachine
from twolane.sim.profile import simulated_profile
from twolane.sim.run import shapes_of
from twolane.slo import Slo
from twolane.systems.registry import SYSTEMS


class Cost(NamedTuple):
    """Microseconds for each token, but for `plan` and `most`."""

    launch: float
    reap: float
    report: float
    plan: float
    """Milliseconds of plans for each launch."""
    most: float
    """Milliseconds of the longest plan but for one in a hundred."""


class Rig:
    """An engine with as many requests in decode as wait."""

    def __init__(self, system: str, count: int, longest: int = 900) -> None:
        self._draw, self._longest, self._sent = random.Random(0), longest, 0
        gpu, bounds = GPUS["h200"], Slo(ttft=1e4, ttft_per_token=1e-3, tbt=max(0.05, count / 4e3))
        pool = {"max_running": count, "kv_tokens": count * 2 * longest}
        # Every token of a budget that decoding requests fill is theirs: no prompt would begin.
        budgeted = hasattr(SYSTEMS[system], "token_budget")
        options = {"token_budget": str(count + 2048)} if budgeted else {}
        config = EngineConfig(model="qwen3-8b", system=system, slo=bounds, options=options, **pool)
        spec = shapes_of(config)
        machine = SimulatedMachine(gpu, spec, config, tp=1, seed=0)
        profile = str(simulated_profile(gpu, spec, 1, config))
        config = msgspec.structs.replace(config, profile=profile)
        self.engine = assemble(config, machine, lambda: None, lambda *_: None).engine
        assert isinstance(self.engine.state.lanes, SimLanes)
        self.lanes = self.engine.state.lanes
        self._submit(count)
        while len(self.engine.state.decoding) < count:
            self.turn(lambda part, call: call())
        self._submit(count)

    def _submit(self, count: int) -> None:
        params = SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0.0)
        for _ in range(count):
            length = self._draw.randrange(64, self._longest)
            prompt = [self._draw.randrange(1000) for _ in range(length)]
            self.engine.take([Submit(str(self._sent), prompt, params)])
            self._sent += 1

    def turn(self, timed: Callable[[str, Callable[[], Any]], Any]) -> tuple[int, int]:
        """Make one turn; return the numbers of tokens that it delivered and of its launches."""
        timed("reap", self.engine.reap)
        outputs = timed("report", self.engine.outputs)
        plan = timed("plan", self.engine.plan)
        if not timed("launch", lambda: self.engine.carry_out(plan)):
            events = (self.lanes.next_event(), plan.wake_at)
            self.lanes.advance(min(at for at in events if at is not None))
        tokens = sum(len(each.tokens) for each in outputs.outputs) if outputs else 0
        return tokens, len(plan.launches)


def cost(system: str, count: int, launches: int = 40, longest: int = 900) -> Cost:
    """Measure the cost of a system with so many rows and as many waiting requests."""
    rig = Rig(system, count, longest)
    clock, spent, plans = time.thread_time, dict.fromkeys(("reap", "report", "launch"), 0.0), []
    in_lanes, launch = [0.0], rig.lanes.launch

    def launched(*work: Any) -> Any:
        begun = clock()
        ticket = launch(*work)
        in_lanes[0] += clock() - begun
        return ticket

    def timed(part: str, call: Callable[[], Any]) -> Any:
        begun, in_lanes[0] = clock(), 0.0
        result = call()
        took = clock() - begun - in_lanes[0]
        if part == "plan":
            plans.append(took)
        else:
            spent[part] += took
        return result

    rig.lanes.launch = launched  # type: ignore[method-assign]
    tokens = made = 0
    with gc_disabled():
        while made < launches:
            new, more = rig.turn(timed)
            tokens, made = tokens + new, made + more
    per = {part: 1e6 * seconds / max(1, tokens) for part, seconds in spent.items()}
    most = statistics.quantiles(plans, n=100)[-1]
    return Cost(per["launch"], per["reap"], per["report"], 1e3 * sum(plans) / made, 1e3 * most)


def main() -> None:
    """Measure and print a line for each system and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--counts", nargs="+", type=int, default=[64, 256, 1024, 4096])
    options = parser.parse_args()
    systems: Sequence[str] = options.systems
    print("| system | rows | launch us | reap us | report us | plan ms | P99 plan ms |")
    for system in systems:
        for count in options.counts:
            cells = " | ".join(f"{each:.2f}" for each in cost(system, count))
            print(f"| {system} | {count:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
