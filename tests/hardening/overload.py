"""Twice the load that the server can carry, with clients that leave and prompts that do not fit.

    python -m tests.hardening.overload --seconds 600

measures the capacity first, and exits with 1 unless there were answers and refusals only, memory
stayed flat, the metrics added up at every look, and all pages came back.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..server.serving import Served, serving
from .checkpoint import write_text_model
from .footprint import MIB, Footprint
from .load import Clients, Tally
from .target import ARGUMENTS, Target

WARM_UP = 0.25
"""Share of the time before memory is judged."""
GROWTH_LIMIT = 16 * MIB
"""What a process may grow by the fitted line after the warm-up: allocators are never still."""
LOOK_SECONDS = 1.0
MORE_SECONDS = 60.0
"""So much longer the load may last until a request is refused."""
SHORT_QUEUE = ("--max-queue", "16", "--arrival-seconds", "120")
"""So that it is full soon, also where the machine is slow; clients may be slow to send, too."""
ORDERLY = {"finished", "too long", "queue full", "left"}


@dataclass
class Watch:
    """What was seen of the server while it was under load."""

    times: list[float] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    max_waiting: float = 0.0

    def look(self, served: Served) -> None:
        """Measure the processes, and see whether the metrics add up."""
        self.times.append(time.monotonic())
        self.footprints.append(Footprint.of(served))
        figures = served.metrics()
        self.max_waiting = max(self.max_waiting, figures["num_requests_waiting"])
        self.faults += unbalanced(figures)

    def growth(self, name: str) -> float:
        """Return by how much a figure of the footprint grew after the warm-up, by a fitted line."""
        begin = self.times[0] + WARM_UP * (self.times[-1] - self.times[0])
        seen = [
            (at, getattr(footprint, name))
            for at, footprint in zip(self.times, self.footprints, strict=True)
            if at >= begin
        ]
        times, values = np.array(seen).T
        return float(np.polyfit(times - times[0], values, 1)[0] * (times[-1] - times[0]))


def unbalanced(figures: dict[str, float]) -> list[str]:
    """Return what is wrong with the sums of a server's metrics at one moment."""
    received = figures["requests_received_total"]
    parts = ("request_success_total", "requests_refused_total", "requests_aborted_total")
    ended = sum(figures.get(name, 0.0) for name in parts)
    if received == ended + figures["requests_in_flight"]:
        return []
    return [f"{received} received, {ended} ended, {figures['requests_in_flight']} in flight"]


def disagreements(figures: dict[str, float], tally: Tally) -> list[str]:
    """Return where the server's counts at rest contradict what its clients saw.

    Only clients that left may have been counted differently: as not received at all, as finished,
    refused or aborted.
    """
    left = tally.ends["left"]
    refused = tally.ends["too long"] + tally.ends["queue full"]
    seen = {
        "requests_received_total": tally.sent - left,
        "request_success_total": tally.ends["finished"],
        "requests_refused_total": refused,
        "requests_aborted_total": 0,
    }
    return [
        f"{name}: {figures.get(name, 0.0):g}, clients saw {least} and {left} that left"
        for name, least in seen.items()
        if not least <= figures.get(name, 0.0) <= least + left
    ]


async def overload(target: Target, seconds: float, seed: int = 0) -> tuple[Tally, Watch]:
    """Overload a server; return what its clients saw and what was watched."""
    chance = random.Random(seed)
    watch = Watch()
    async with Clients(target.served.base, target.context, seed).connected() as clients:
        capacity = await clients.measure_capacity()
        end = time.monotonic() + seconds

        def over() -> bool:
            """Where a machine is suddenly faster, its queue is full when that has been measured."""
            late = time.monotonic() - end
            return late > MORE_SECONDS or (late > 0 and clients.tally.ends["queue full"] > 0)

        loading = asyncio.create_task(clients.overload(capacity, over))
        while not loading.done():
            await asyncio.to_thread(watch.look, target.served)
            await asyncio.wait({loading}, timeout=chance.uniform(0.0, 2 * LOOK_SECONDS))
        await loading
    return clients.tally, watch


def judge(target: Target, tally: Tally, watch: Watch, growth: float = GROWTH_LIMIT) -> list[str]:
    """Return everything that was wrong, once the load is over."""
    target.check_quiet()
    faults = [*tally.faults, *watch.faults]
    faults += [f"{tally.ends[end]} requests: {end}" for end in tally.ends.keys() - ORDERLY]
    figures = target.served.metrics()
    # The target has asked on its own behalf, too: those requests were all answered.
    own = Tally(tally.sent + target.asked, tally.ends + Counter(finished=target.asked))
    faults += unbalanced(figures) + disagreements(figures, own)
    faults += [
        f"{name} grew by {watch.growth(name) / MIB:.1f} MiB"
        for name in ("front_rss", "engine_rss")
        if watch.growth(name) > growth
    ]
    if tally.ends["queue full"] == 0:
        faults.append("nothing was refused: this was no overload")
    target.check_room()
    target.check_good_request()
    return faults


def report(tally: Tally, watch: Watch) -> str:
    """Tell what happened."""
    ends = ", ".join(f"{count} {end}" for end, count in tally.ends.most_common())
    last = watch.footprints[-1]
    lines = [
        f"{tally.sent} requests in {watch.times[-1] - watch.times[0]:.0f} s, twice the capacity: "
        f"{ends}",
        f"{len(watch.times)} looks, up to {watch.max_waiting:g} requests waiting",
        f"front {last.front_rss / MIB:.0f} MiB, grew by {watch.growth('front_rss') / MIB:+.1f}; "
        f"engine {last.engine_rss / MIB:.0f} MiB, grew by {watch.growth('engine_rss') / MIB:+.1f}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or str(write_text_model(Path(folder) / "model"))
        with serving(model, *ARGUMENTS, *SHORT_QUEUE, stderr=Path(folder) / "log") as served:
            print(served.announcement, flush=True)
            target = Target(served)
            tally, watch = asyncio.run(overload(target, chosen.seconds, chosen.seed))
            print(report(tally, watch), flush=True)
            faults = judge(target, tally, watch)
        log = (Path(folder) / "log").read_text()
        faults += ["the server logged a defect:\n" + log[-3000:]] if "Traceback" in log else []
    print("\n".join(faults[:20]) or "answers and refusals only; the books add up; memory is flat")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
