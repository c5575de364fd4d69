"""What a client with a playout buffer shows, by hand and beside the engine's pacer."""

import pytest

from twolane.engine import build
from twolane.engine.config import EngineConfig
from twolane.engine.pacing import Pacer
from twolane.playout import shown
from twolane.results.metrics import as_shown, measure
from twolane.results.record import Record
from twolane.results.result import BenchConfig
from twolane.sim.config import SimulateConfig
from twolane.sim.run import simulate
from twolane.slo import Slo
from twolane.workload.spec import WorkloadSpec

TRANSPORT = 0.002


def ms(*times):
    return [time / 1e3 for time in times]


def test_tokens_are_shown_as_computed_by_hand():
    """A bound of 20 ms: the pace is 19.4 ms, and 20 ms are the longest that a token is held."""
    arrivals = ms(0, 10, 15, 60, 61, 90, 90)
    assert shown(arrivals, 0.020, 0.050) == pytest.approx(ms(20, 30, 35, 60, 79.4, 98.8, 110))
    assert shown(arrivals, 0.020, 0.005) == pytest.approx(ms(5, 15, 20, 60, 66, 90, 95))
    assert shown(arrivals, 0.020, 0.0) == arrivals


@pytest.mark.parametrize(
    ("deadline", "first"), [(None, 1.020), (1.050, 1.020), (1.012, 1.012), (0.9, 1.020)]
)
def test_a_first_token_is_shown_within_its_bound_if_it_arrived_so(deadline, first):
    times = shown([1.0, 1.001], 0.020, 0.020, deadline)
    assert times == pytest.approx([first, min(first + 0.0194, 1.021)])


def test_the_only_token_is_shown_at_once():
    assert shown([1.0], 0.020, 0.020) == [1.0]
    assert shown([], 0.020, 0.020) == []


def record(times, **fields):
    base = {"index": 0, "asked_prompt": 1024, "asked_output": 4, "scheduled": 0.0, "waited": 0.0}
    return Record(**{**base, "sent": 0.0, "ended": times[-1], "outcome": "ok", **fields},
                  token_times=tuple(times))  # fmt: skip


def test_gaps_and_first_tokens_are_reported_raw_and_as_shown():
    """Events of one, three and one tokens; the gap of 50 ms is within 20 ms as shown."""
    one = record(ms(990, 1000, 1050), chunk_tokens=(1, 3, 1), usage_output=5)
    slos = {"ttft": 0.5, "ttft_per_1k": 0.5, "tbt": 0.020}
    # The TTFT bound is 1 s: the first token is shown then and not at 1,010 ms.
    times = ms(1000, 1019.4, 1020, 1020, 1050)
    assert as_shown(one, slos, 0.020).token_times == pytest.approx(times)
    found = measure([one], 1.0, slos, playout=0.020)
    assert found.attainment.requests == {"ttft": 1.0, "tbt": 0.0}
    assert found.attainment.gaps == 0.5
    assert found.shown.attainment.requests["ttft"] == 1.0
    assert found.shown.attainment.gaps == 0.75
    assert found.shown.tbt.max == pytest.approx(0.030)
    assert found.ttft.mean == pytest.approx(0.990)
    assert found.shown.ttft.mean == pytest.approx(1.0)
    assert found.shown.uncounted == 0
    assert measure([one], 1.0, slos).shown is None


def test_chunks_of_an_unknown_number_of_tokens_are_reported():
    unknown = record(ms(10, 20), usage_output=5)
    each = record(ms(10, 20), usage_output=2)
    found = measure([unknown, each], 1.0, {"tbt": 0.020}, playout=0.020)
    assert found.shown.uncounted == 1


def served(monkeypatch, **engine):
    """Requests of a simulation at saturation, with the pacer's times for each of their tokens."""
    paced = {}

    class Recording(Pacer):
        def schedule(self, request, at):
            super().schedule(request, at)
            paced.setdefault(request.id, []).append((request, request.last_token_at, request.due))

        def schedule_rows(self, columns, slots, at):
            times = super().schedule_rows(columns, slots, at)
            requests = {request.allocation.slot: request for request in columns.requests}
            for slot, (made, due, *_) in zip(slots.tolist(), times, strict=True):
                request = requests[slot]
                paced.setdefault(request.id, []).append((request, made, due))
            return times

    monkeypatch.setattr(build, "Pacer", Recording)
    workload = WorkloadSpec(dataset="azure-conv", num_prompts=120, request_rate=30, seed=3)
    slo = Slo(ttft=0.3, ttft_per_token=0.2 / 1024, tbt=0.012)
    config = SimulateConfig(
        engine=EngineConfig(model="qwen3-8b", slo=slo, transport=TRANSPORT, **engine),
        bench=BenchConfig(workload=workload),
    )
    return simulate(config), paced


@pytest.mark.parametrize("buffer", [0.020, 0.008])
def test_shown_times_are_those_of_the_pacer(monkeypatch, buffer):
    """From production times plus transport, by the bound that is planned for."""
    _, paced = served(monkeypatch, tbt_buffer=buffer)
    planned = 0.012 - min(TRANSPORT, 0.012 / 40)
    late = 0
    for tokens in paced.values():
        [(request, *_), *_] = tokens
        arrivals = [made + TRANSPORT for _, made, _ in tokens]
        late += request.deadline < arrivals[0]
        due = [due for *_, due in tokens]
        assert shown(arrivals, planned, buffer, request.deadline) == pytest.approx(due, abs=1e-6)
    assert len(paced) > 100
    assert 0 < late < len(paced)


def test_an_engine_whose_clients_hold_tokens_back_plans_alike_and_sends_at_once(monkeypatch):
    """Every launch is the same: what the client's buffer shows is what the server's delivers."""
    held, paced = served(monkeypatch)
    sent, same = served(monkeypatch, tbt_buffer_at="client")
    times = [[at for _, at, _ in tokens] for tokens in paced.values()]
    assert times == [[at for _, at, _ in tokens] for tokens in same.values()]
    assert held.result.simulated["lane_seconds"] == sent.result.simulated["lane_seconds"]
    early = late = 0
    for one, other in zip(held.served, sent.served, strict=True):
        pairs = [*zip(other.record.token_times, one.record.token_times, strict=True)]
        early += sum(at < due - 1e-3 for at, due in pairs)
        late += sum(at > due + 1e-9 for at, due in pairs)
    assert early > 1000
    assert late == 0
