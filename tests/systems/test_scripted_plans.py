"""One plan a paper, by hand: the interface admits what each of the four systems has to say.

The scripts decide nothing; they go through the motions that the papers describe, on simulated
lanes where a prefill layer takes 10 ms and a decode step 20 ms.
"""

from dataclasses import dataclass

import pytest

from tests.estimate import synthetic
from tests.systems.simulation import LAYERS, UNITS, Ran, simulate, submit
from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.plan import DecodeSteps, Hybrid, Launch, Plan, PrefillSlice
from twolane.systems.view import View


def slice_of(view: View, layers: int, units: int, *, admitted: bool = False) -> Launch:
    first = 0 if admitted or view.batch is None else view.batch.layers_launched
    return Launch("prefill", units, PrefillSlice(first, min(first + layers, view.layers)))


def idle(view: View, lane: str) -> bool:
    return view.lanes[lane].queued == 0


def busy(view: View) -> list[str]:
    return [lane for lane in view.lanes if not idle(view, lane)]


@dataclass(frozen=True)
class Bullet(System):
    """Two layers a step; decode gets 66 units, overlapping with prefill's 100, for the last ones;
    decode is paused while the second prompt's first four layers run (§3.3.1)."""

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        chunks = () if view.batch else next_chunks(view, 4096, split=False)
        launches = []
        if idle(view, "prefill") and (view.batch or chunks):
            launches.append(slice_of(view, 2, 100, admitted=bool(chunks)))
        done = view.batch.layers_launched if view.batch else 0
        paused = bool(view.batch or chunks) and done < 4
        handing_over = done >= 6 or bool(view.launched_batches)
        if view.decoding and idle(view, "decode") and not paused:
            launches.append(Launch("decode", 66 if handing_over else 32, DecodeSteps()))
        return Plan(admit=chunks, launches=tuple(launches), reason="step"), None


def test_bullet_overlapping_hand_over_and_paused_decode() -> None:
    """Bullet §3.3.1: decode is suspended under load; near the end of a prefill, decode gets more
    SMs while prefill still has its own, without synchronising the two."""
    sim = simulate(Bullet(), [(0.0, submit("a", 100, 12)), (0.1, submit("b", 400, 3))])
    prefill, decode = sim.record.of("prefill"), sim.record.of("decode")
    second = [ran for ran in prefill if ran.requests == ["b"]]
    assert [ran.name for ran in second] == [f"layers {i}:{i + 2}" for i in range(0, LAYERS, 2)]
    paused = [d for d in decode if any(d.overlaps(p) for p in second[:1])]
    assert len(paused) <= 1  # the step that was under way when the prompt came
    over = [(d, p) for d in decode for p in second[2:] if d.overlaps(p) and d.units == 66]
    assert over
    assert all(d.units + p.units > UNITS for d, p in over)
    assert sim.finish == {"a": "length", "b": "length"}
    assert len(sim.times["a"]) == 12


@dataclass(frozen=True)
class DuetServe(System):
    """A chunk of at most 64 tokens on 100 units beside k = 3 steps on 32; both sides join."""

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        if not (idle(view, "prefill") and idle(view, "decode")):
            return Plan(reason="the gang is not complete"), None
        chunks = next_chunks(view, 64, split=True)
        launches = []
        if view.decoding:
            launches.append(Launch("decode", 32, DecodeSteps(3)))
        if chunks:
            launches.append(Launch("prefill", 100, PrefillSlice(0, view.layers)))
        return Plan(admit=chunks, launches=tuple(launches), reason="gang"), None


def test_duetserve_gang_of_look_ahead_steps_and_a_chunk() -> None:
    """DuetServe §4.2, §4.3: k decode steps run beside one chunked prefill batch; the next
    decision is made when both sides are through: max(k t_d, t_p)."""
    sim = simulate(DuetServe(), [(0.0, submit("a", 64, 14)), (0.01, submit("b", 200, 4))])
    chunks = [ran for ran in sim.record.of("prefill") if ran.requests == ["b"]]
    assert [ran.tokens for ran in chunks] == [64, 64, 64, 8]
    gangs = [(c, d) for c in chunks for d in sim.record.of("decode") if d.start == c.start]
    assert len(gangs) == len(chunks)
    assert all(d.name == "decode x3" for _, d in gangs)
    ends = [max(c.end, d.end) for c, d in gangs]
    assert [c.start for c in chunks[1:]] == ends[:-1]
    assert [len(sim.times[r]) for r in "ab"] == [14, 4]


@dataclass(frozen=True)
class MuxWise(System):
    """Two layers a round beside each decode step; a short prompt preempts a long one once; the
    long one goes on at another level when decode has ended (§3.2.3, §3.4.2)."""

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        short = [request for request in view.waiting if request.new <= 64]
        preempt = bool(view.batch and short and not view.parked)
        open_batch = None if preempt else view.batch
        chunks = next_chunks(view, 64, split=False) if open_batch is None and short else ()
        if open_batch is None and not chunks and view.waiting and not view.parked:
            chunks = next_chunks(view, 4096, split=False)
        resume = open_batch is None and not chunks and view.parked is not None
        launches = []
        if view.decoding and idle(view, "decode"):
            launches.append(Launch("decode", 48, DecodeSteps()))
        units = 84 if view.decoding else UNITS
        batch = view.parked if resume else open_batch
        if idle(view, "prefill") and (batch or chunks):
            first = 0 if chunks or batch is None else batch.layers_launched
            launches.append(Launch("prefill", units, PrefillSlice(first, first + 2)))
        plan = Plan(
            preempt=preempt, admit=chunks, resume=resume, launches=tuple(launches), reason="round"
        )
        return plan, None


def test_muxwise_preempts_resumes_and_changes_level_in_mid_prefill() -> None:
    """MuxWise §3.2.3: layer-wise execution lets a short request preempt a long one, and moves
    the later layers into another context as soon as decode terminates."""
    sim = simulate(
        MuxWise(),
        [
            (0.0, submit("d", 65, 4)),
            (0.09, submit("long", 800, 2)),
            (0.115, submit("short", 40, 2)),
        ],
    )
    prefill = [(ran.requests, ran.name, ran.units) for ran in sim.record.of("prefill")][4:]
    names = [requests[0] for requests, _, _ in prefill]
    first_short, last_short = names.index("short"), len(names) - names[::-1].index("short")
    assert names[:first_short].count("long") in (1, 2)
    assert names[first_short:last_short] == ["short"] * 4
    assert names[last_short:].count("long") == 4 - names[:first_short].count("long")
    layers = [name for requests, name, _ in prefill if requests == ["long"]]
    assert layers == ["layers 0:2", "layers 2:4", "layers 4:6", "layers 6:8"]
    assert {units for requests, _, units in prefill if requests == ["long"]} == {84, UNITS}
    assert sim.times["short"][0] < sim.times["long"][0]


@dataclass(frozen=True)
class Drift(System):
    """Blocks of two layers, one with every decode step, decode launched first (§3.3)."""

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        if not (idle(view, "prefill") and idle(view, "decode")):
            return Plan(), None
        chunks = () if view.batch else next_chunks(view, 4096, split=False)
        both = bool(view.decoding and (view.batch or chunks))
        launches = []
        if view.decoding:
            launches.append(Launch("decode", 48 if both else UNITS, DecodeSteps()))
        if view.batch or chunks:
            launches.append(slice_of(view, 2, 84 if both else UNITS, admitted=bool(chunks)))
        return Plan(admit=chunks, launches=tuple(launches), reason="block"), None


def test_drift_blocks_beside_decode_steps() -> None:
    """Drift §3.3: prefill blocks are launched beside decode graphs, decode first; a finished
    prefill merges into the decode batch without stopping it."""
    sim = simulate(Drift(), [(0.0, submit("a", 50, 10)), (0.081, submit("b", 300, 5))])
    blocks = [ran for ran in sim.record.of("prefill") if ran.requests == ["b"]]
    assert [ran.name for ran in blocks] == ["layers 0:2", "layers 2:4", "layers 4:6", "layers 6:8"]
    beside = [d for d in sim.record.of("decode") if d.start in {b.start for b in blocks}]
    assert [(d.units, b.units) for d, b in zip(beside, blocks, strict=True)] == [(48, 84)] * 4
    merged: list[Ran] = [d for d in sim.record.of("decode") if set(d.requests) == {"a", "b"}]
    assert len(merged) == 4
    gaps = [b - a for a, b in zip(sim.times["a"], sim.times["a"][1:], strict=False)]
    assert max(gaps) == pytest.approx(0.020)


@dataclass(frozen=True)
class PassBehindLanes(System):
    """One prompt alone, the next one beside a decode step, the third in a pass behind both."""

    untils: list[dict[str, float | None]]
    """What the lanes were said to last, with all three queued."""

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        queued = busy(view)
        if len(queued) == 3:
            self.untils.append({lane: each.until for lane, each in view.lanes.items()})
        chunks, launches = next_chunks(view, 3000, split=False), []
        if chunks and view.decoding and not queued:
            launches.append(Launch("decode", 32, DecodeSteps()))
            launches.append(slice_of(view, LAYERS, 100, admitted=True))
        elif chunks and (queued == ["prefill", "decode"] or not view.decoding):
            launches.append(Launch("device", UNITS, Hybrid()))
        elif view.decoding and not queued:
            launches.append(Launch("device", UNITS, DecodeSteps()))
        return Plan(admit=chunks if launches else (), launches=tuple(launches)), None


def test_a_pass_behind_both_lanes_decodes_those_whose_prompts_end_before_it() -> None:
    """The whole device excludes the lanes: it begins when both have ended, as is predicted."""
    script = PassBehindLanes([])
    arrivals = [(0.0, submit("a", 100, 9)), (0.1, submit("b", 3000, 9)), (0.1, submit("c", 80, 9))]
    sim = simulate(script, arrivals, estimator=synthetic.calibrated())
    (behind,) = [ran for ran in sim.record.of("device") if "c" in ran.requests][:1]
    (prompt,) = sim.record.of("prefill")
    assert behind.requests == ["a", "b", "c"]
    assert behind.start == prompt.end > max(step.end for step in sim.record.of("decode"))
    assert sim.times["b"][1] == sim.times["c"][0]
    until = script.untils[0]
    assert until["device"] > until["prefill"] > until["decode"]


@dataclass(frozen=True)
class SliceBehindStep(System):
    """A prompt in its lane, behind a step on the whole device."""

    untils: list[dict[str, float | None]]

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        queued = busy(view)
        if queued == ["prefill", "device"]:
            self.untils.append({lane: view.lanes[lane].until for lane in queued})
        chunks = () if queued else next_chunks(view, 3000, split=False)
        launches = []
        if view.decoding and not queued:
            launches.append(Launch("device", UNITS, DecodeSteps()))
        if chunks:
            launches.append(slice_of(view, LAYERS, 100, admitted=True))
        return Plan(admit=chunks, launches=tuple(launches)), None


def test_a_lane_begins_when_the_whole_device_is_free() -> None:
    """And is predicted to, though no request is in both."""
    script = SliceBehindStep([])
    arrivals = [(0.0, submit("a", 100, 9)), (0.1, submit("b", 10, 9))]
    sim = simulate(script, arrivals, estimator=synthetic.calibrated())
    prompt = sim.record.of("prefill")[1]
    assert prompt.start in [step.end for step in sim.record.of("device")]
    assert script.untils[0]["prefill"] > script.untils[0]["device"]
