"""The search for goodput: against functions whose answer is known, and against whole sweeps."""

import asyncio
import json
import math
import random
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from twolane.bench.contenders import measure, simulation
from twolane.bench.goodput import (
    EarlyStop,
    Search,
    find,
    highest,
    lasting,
    shares,
    tuned,
    variants,
)
from twolane.cli.bench.main import app
from twolane.common.errors import FieldError
from twolane.results.metrics import Distribution, attain
from twolane.results.record import Record
from twolane.results.result import BenchConfig, Result
from twolane.results.summary import result_dict
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest

from .scripted import STALL, ScriptedServer, text

SIMULATED = ["--simulate", "h200", "--model", "llama-3.1-8b"]


@pytest.mark.parametrize("limit", [0.004, 0.3, 1.0, 1.5, 17.0, 1234.5])
@pytest.mark.parametrize("start", [0.01, 1.0, 64.0])
def test_the_highest_rate_that_holds(limit, start):
    asked = []

    def holds(rate):
        asked.append(rate)
        return rate <= limit

    found = highest(holds, start, 36)
    assert limit / 1.02 <= found <= limit
    assert len(asked) == len(set(asked)) < 30


def test_nothing_holds_or_everything_does():
    assert highest(lambda rate: False, 1.0, 36) == 0.0
    assert highest(lambda rate: True, 1.0, 36) > 9e4
    assert highest(lambda rate: rate <= 2.0, 8.0, 36, floor=2.0) == pytest.approx(2.0)
    assert highest(lambda rate: rate <= 1.99, 8.0, 36, floor=2.0) == 0.0


def test_what_fails_with_each_request_alone_is_not_tried_slower():
    asked = []
    assert highest(lambda rate: asked.append(rate), 8.0, 36) == 0.0
    assert asked == [8.0]
    verdicts = iter([True, None, *[True] * 9])
    assert highest(lambda rate: next(verdicts), 8.0, 36) == pytest.approx(16.0, rel=0.02)


@pytest.mark.parametrize("limit", [7.1, 8.0, 9.0])
def test_a_short_first_step_spares_a_good_guess_the_slow_runs(limit):
    runs = {}
    for stride in (9, 36):
        rates = runs[stride] = []
        found = highest(lambda rate: rates.append(rate) or rate <= limit, 8.0, 36, stride=stride)  # noqa: B023
        assert limit / 1.02 <= found <= limit
        assert rates[1] == pytest.approx(8.0 * 2 ** ((1 if limit >= 8.0 else -1) * stride / 36))
    assert len(runs[9]) < len(runs[36])


@pytest.mark.parametrize("steps", [-40, -3, -1, 0, 1, 2, 9, 50])
def test_a_search_that_begins_near_finds_the_same_in_fewer_runs(steps):
    limit = 5.3
    runs = {}

    def asked(near):
        rates = runs[near] = []
        return highest(lambda rate: rates.append(rate) or rate <= limit, 1.0, 16, near)

    plain = asked(None)
    near = plain * 2 ** (steps / 16)
    assert asked(near) == pytest.approx(plain)
    if abs(steps) < 3:
        assert len(runs[near]) < len(runs[None])
    assert runs[near][0] == pytest.approx(near)


def record(ttft, *gaps, outcome="ok"):
    times = [ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Record(
        index=0,
        asked_prompt=8,
        asked_output=len(times),
        scheduled=0.0,
        waited=0.0,
        sent=0.0,
        ended=times[-1],
        outcome=outcome,
        token_times=tuple(times) if outcome == "ok" else (),
        usage_output=len(times),
    )


@pytest.mark.parametrize("outcome", ["ok", "status_429"])
def test_a_run_ends_with_the_first_miss_too_many(outcome):
    """Of 200 requests 2 may miss at 99 %, not 3; of 400 gaps 4, not 5."""
    workload = [TraceRequest(0.0, 8, 3)] * 200
    late = record(1.0, 0.01, 0.01, outcome=outcome)
    ttft = EarlyStop(workload, [{"ttft": 0.5}], 0.99)
    assert [ttft(late) for _ in range(3)] == [False, False, True]
    slow = record(0.1, 0.01, 0.2, outcome=outcome)
    tbt = EarlyStop(workload, [{"ttft": 2.0, "tbt": 0.1}], 0.99)
    misses = 5 if outcome == "ok" else 3  # a refused answer owes both its gaps
    assert [tbt(slow) for _ in range(misses)] == [False] * (misses - 1) + [True]
    assert not any(tbt(record(0.1, 0.01)) for tbt in [EarlyStop(workload, [{"ttft": 1.0}], 0.99)])


def test_a_run_ends_when_no_point_can_be_attained():
    workload = [TraceRequest(0.0, 8, 3)] * 200
    watch = EarlyStop(workload, [{"ttft": 2.0, "tbt": tbt} for tbt in (0.1, 0.3)], 0.99)
    assert not any(watch(record(0.1, 0.2, 0.2)) for _ in range(20))
    assert [watch(record(0.1, 0.4, 0.4)) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("times", [(0.1, 0.3, 0.5), (3.5, 3.6, 3.7)], ids=["gaps", "first token"])
def test_misses_are_counted_once_as_tokens_come(times):
    """4 gaps or 2 first tokens may miss: a request's second token, or the third first one, ends it.

    What was counted token by token is not counted again when the request has ended.
    """
    workload = [TraceRequest(0.0, 512, 3)] * 200
    slos = {"ttft": 2.0, "ttft_per_1k": 1.0, "tbt": 0.15}
    watch, plain = (EarlyStop(workload, [slos], 0.99) for _ in range(2))
    verdicts = []
    for index in range(3):
        ended = replace(record(times[0]), index=index, token_times=times, asked_prompt=512)
        first, second = watch.tokens(index, times[:1], 1), watch.tokens(index, times, 2)
        verdicts.append((first, second, watch(ended), plain(ended)))
    assert [ended for *_, ended, _ in verdicts] == [plain for *_, plain in verdicts]
    assert verdicts[2][0] == (times[0] > 2.5)
    assert verdicts[2][1:] == (True, True, True)


def test_late_first_tokens_end_a_run_though_no_answer_has_ended():
    """Two of ten may be late at 80 %: the third first token ends it."""
    server = ScriptedServer(lambda number, body: [(0.0, text("a")), (0.0, STALL)])
    search = search_of({"ttft": 1e-9}, requests=10)

    async def main():
        async with server.serving() as url:
            load = BenchConfig(base_url=url, model="scripted-model", max_concurrency=3)
            workload = replace(search.at(1e5, 0), max_input_len=8)
            asked = replace(search, attainment=0.8), load, workload, [search.slos]
            return await asyncio.to_thread(measure, *asked)

    result, hopeless = asyncio.run(main())
    assert hopeless
    assert [record.outcome for record in result.records] == ["interrupted"] * 3
    assert all(record.ttft for record in result.records)


def test_a_search_that_ends_as_no_lower_rate_can_hold_says_so(tmp_path):
    arguments = "--simulate h200 --model llama-3.1-8b --system static-split --num-prompts 4 --brief"
    arguments += " --goodput ttft:1 --start-rate 0.01"
    done = CliRunner().invoke(app, ["goodput", "--out", str(tmp_path), *arguments.split()])
    assert done.exit_code == 0, done.output
    assert "although each request was alone, so lower rates are not tried" in done.output


def test_what_is_told_early_is_what_the_whole_run_says():
    """Beyond capacity, simulated: what the run had when it was ended already fails whole."""
    search = search_of({"ttft": 0.3, "tbt": 0.06}, requests=40)
    run = simulation(search)
    workload = search.at(80.0, 0)
    for system in ("prefill-first", "chunked"):
        result, hopeless = run(system, workload, [search.slos])
        assert hopeless
        assert result.interrupted
        assert "interrupted" in result.metrics.outcomes
        lax = {"ttft": 600.0, "tbt": 60.0}
        whole, _ = run(system, workload, [lax])
        kept = attain(whole.records, search.slos)
        assert min(kept.gaps, kept.requests["ttft"]) < 0.99


def test_answers_of_one_token_keep_a_bound_on_gaps(tmp_path):
    """They have no gap to miss; one that failed has kept nothing."""
    workload = WorkloadSpec(num_prompts=8, random_input_len=40, random_output_len=1)
    search = replace(search_of({"tbt": 0.05}, tolerance=0.9, start_rate=5e4), workload=workload)
    served = simulation(search)

    def failing(*asked):
        result, hopeless = served(*asked)
        *kept, last = result.records
        failed = replace(last, outcome="status_500", token_times=())
        return replace(result, records=(*kept, failed)), hopeless

    assert find(search, ["chunked"], served, tmp_path / "served")[0]["chunked"][0] > 5e4
    search = replace(search, least_rate=5e4)
    assert find(search, ["chunked"], failing, tmp_path / "failing")[0]["chunked"] == [0.0]


def search_of(slos, requests=100, dataset="azure-conv", output=None, **more):
    """A search with so many requests, and at most so many tokens of an answer."""
    return Search(
        target={"simulate": "h200", "model": "llama-3.1-8b", "tp": 1},
        workload=WorkloadSpec(dataset=dataset, num_prompts=requests, max_output_len=output),
        slos=slos,
        **{"start_rate": 8.0, "brief": True, **more},
    )


def sweep(search, system, around):
    """The highest rate of a fine grid that holds, every one of them tried."""
    run = simulation(search)
    rates = [around * 1.02**step for step in range(-14, 15)]
    kept = []
    for rate in rates:
        result, hopeless = run(system, search.at(rate, 0), [search.slos])
        attained = result.metrics.attainment
        shares = [attained.gaps if n == "tbt" else attained.requests[n] for n in search.slos]
        if not hopeless and min(shares) >= search.attainment:
            kept.append(rate)
    return max(kept)


def random_pair(seed):
    """A system with settings, and SLOs that it can hold at some rate."""
    rng = random.Random(seed)
    budget, units = rng.choice([512, 1024, 2048]), rng.choice([32, 48, 64])
    system = rng.choice([f"chunked:token_budget={budget}", f"static-split:decode_units={units}"])
    slos = {"ttft": rng.uniform(0.4, 2.0)}
    if rng.random() < 0.7:
        slos["tbt"] = rng.uniform(0.07, 0.15)
    return system, slos


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))]
)
def test_the_search_agrees_with_a_sweep(seed, tmp_path):
    system, slos = random_pair(seed)
    search = search_of(slos, requests=30 if seed == 0 else 120)
    [found] = find(search, [system], simulation(search), tmp_path)[0][system]
    assert found > 0
    assert found == pytest.approx(sweep(search, system, found), rel=0.05)


def test_a_search_goes_on_where_it_was_ended(tmp_path):
    """Killed in the middle, it repeats nothing; another search in its folder is refused."""
    search = search_of({"ttft": 1.0, "tbt": 0.1}, requests=15, output=64, seeds=2, tolerance=0.1)
    system, run, runs = "chunked", simulation(search), []

    def killed(name, workload, points):
        if len(runs) == 4:
            raise KeyboardInterrupt
        runs.append(workload)
        return run(name, workload, points)

    def counted(name, workload, points):
        runs.append(workload)
        return run(name, workload, points)

    with pytest.raises(KeyboardInterrupt):
        find(search, [system], killed, tmp_path)
    found = find(search, [system], counted, tmp_path)
    assert len(runs) == len({(w.seed, w.request_rate) for w in runs})
    assert found == find(search, [system], killed, tmp_path)
    saved = json.loads((tmp_path / "summary.json").read_text())["goodput"][system]
    assert saved["seeds"] == found[0][system]
    assert saved["least"] <= saved["median"] <= saved["most"]
    assert len(list(tmp_path.glob("chunked-*.json"))) == len(runs)
    with pytest.raises(FieldError, match="another search"):
        find(search_of({"ttft": 2.0}), [system], run, tmp_path)


def test_an_infinite_burstiness_is_the_same_when_a_search_goes_on(tmp_path):
    """JSON has no infinity; the file says inf, and another burstiness is another search."""
    workload = WorkloadSpec(num_prompts=4, random_input_len=40, burstiness=math.inf)
    search = replace(search_of({"ttft": 60.0}, start_rate=5e4, tolerance=0.9), workload=workload)
    for _ in range(2):
        find(search, ["chunked"], simulation(search), tmp_path)
    assert json.loads((tmp_path / "search.json").read_text())["workload"]["burstiness"] == "inf"
    with pytest.raises(FieldError, match="another search"):
        find(replace(search, workload=replace(workload, burstiness=1.0)), [], None, tmp_path)


def test_a_search_that_never_ran_leaves_its_folder_to_the_next(tmp_path):
    """Such as one with a model that does not exist."""

    def wrong(system, workload, points):
        raise FieldError("model", "there is none")

    search = search_of({"ttft": 60.0}, requests=4, start_rate=5e4, tolerance=0.9)
    with pytest.raises(FieldError, match="there is none"):
        find(replace(search, target={"model": "lama"}), ["chunked"], wrong, tmp_path)
    find(search, ["chunked"], simulation(search), tmp_path)
    assert json.loads((tmp_path / "search.json").read_text())["target"] == search.target


def test_early_ends_count_what_a_playout_buffer_shows():
    """Gaps of 10 and 30 ms within a bound of 20: raw every other one is late, shown none is."""
    workload = [TraceRequest(0.0, 8, 9)] * 20
    times = [sum((0.010, 0.030)[i % 2] for i in range(n)) for n in range(1, 10)]
    ended = replace(record(times[0]), token_times=tuple(times), asked_output=9)
    for playout, misses in ((0.0, True), (0.020, False)):
        whole, watch = (EarlyStop(workload, [{"tbt": 0.020}], 0.99, playout) for _ in range(2))
        by_token = [watch.tokens(0, times[:n], 1) for n in range(1, 10)]
        assert by_token[-1] == whole(ended) == misses
        assert watch(ended) == misses


def test_a_late_shown_gap_is_counted_as_it_comes():
    workload = [TraceRequest(0.0, 8, 3)] * 10
    watch = EarlyStop(workload, [{"tbt": 0.020}], 0.99, 0.020)
    times = [0.0, 0.010, 0.060]  # shown at 20, 30 and 60 ms
    assert [watch.tokens(0, times[:n], 1) for n in (1, 2, 3)] == [False, False, True]


def run_of(rate, count=600, seconds=1.0, slower=1.0, server=False):
    """Requests that arrive evenly, each answered after `seconds`, the last of them as many times as
    late as it came if `slower` is above 1."""
    sent = [(i + 1) / rate for i in range(count)]
    base = {"asked_prompt": 8, "asked_output": 1, "waited": 0.0, "outcome": "ok"}
    records = tuple(
        Record(
            index=i, scheduled=at, sent=at, ended=at * slower + seconds, token_times=(at,), **base
        )
        for i, at in enumerate(sent)
    )
    workload = WorkloadSpec(num_prompts=count, request_rate=rate)
    return Result(
        config=BenchConfig(workload=workload),
        model="m",
        date=datetime.now(UTC),
        workload=tuple(workload.build()),
        records=records,
        duration=records[-1].ended,
        interrupted=False,
        loop_lag=Distribution.of((), (99.0,)),
        simulated=None if server else {},
    )


def test_a_rate_lasts_if_requests_end_as_fast_as_they_come():
    assert lasting(run_of(20.0))
    steady = run_of(20.0).metrics.steady
    assert (steady.arrived, steady.finished) == pytest.approx((20.0, 20.0), rel=0.01)
    assert lasting(run_of(20.0, slower=1.04))
    assert not lasting(run_of(20.0, slower=1.06))  # 18.9 of 20 end per second
    assert not lasting(run_of(20.0, seconds=31.0)), "the run is over before one could end"
    assert not lasting(run_of(20.0), rate=22.0)


@pytest.mark.parametrize(
    ("rate", "count", "server", "enough"),
    [
        (20.0, 599, False, False),
        (4.0, 599, False, False),
        (8.0, 599, True, False),
        (4.0, 250, True, True),
        (4.0, 249, True, False),
        (7.0, 420, True, True),
        (7.0, 419, True, False),
    ],
)
def test_a_run_must_be_long_for_its_rate_to_last(rate, count, server, enough):
    assert lasting(run_of(rate, count, server=server)) == enough


def test_a_search_of_short_runs_is_refused_unless_it_is_brief(tmp_path):
    search = search_of({"ttft": 1.0}, requests=599, brief=False)
    with pytest.raises(FieldError, match="is 599; a run at 8 requests/s needs 600"):
        find(search, ["chunked"], None, tmp_path)


def test_what_meets_its_bounds_but_lets_a_backlog_grow_does_not_hold(tmp_path):
    """A server of ten requests per second, with a bound that a burst of 600 meets at any rate."""

    def run(system, workload, points):
        ended, records = 0.0, []
        for index, request in enumerate(workload.build()):
            ended = max(ended, request.arrival) + 0.1
            times = {"scheduled": request.arrival, "sent": request.arrival, "ended": ended}
            records.append(
                replace(record(1.0), index=index, **times, token_times=(ended,), asked_output=1)
            )
        result = run_of(workload.request_rate)
        config = replace(result.config, workload=workload, goodput=points[0])
        return replace(result, config=config, records=tuple(records), duration=ended), False

    search = search_of({"ttft": 90.0}, 600, least_rate=1.0, brief=False)
    [found] = find(search, ["any"], run, tmp_path / "lasting")[0]["any"]
    assert 9.0 < found < 10.6
    saved = json.loads((tmp_path / "lasting" / "summary.json").read_text())["goodput"]["any"]
    assert saved["seeds"] == [found]
    assert 0.95 * found <= saved["sustained"][0] < 10.1
    [brief] = find(replace(search, brief=True), ["any"], run, tmp_path / "brief")[0]["any"]
    assert brief > 1000


@pytest.mark.parametrize(("system", "tbt"), [("chunked:token_budget=768", 0.021), ("auto", 0.011)])
def test_systems_are_judged_with_equal_playout(system, tbt):
    """Of `chunked`, most late gaps are in time as a client with a buffer shows them; `auto` plans
    with all of the buffer under a short bound and sends tokens at once, so raw it fails."""
    search = search_of({"ttft": 2.0, "tbt": tbt}, 60, playout=0.020, judge="raw", attainment=0.5)
    result, _ = simulation(search)(system, search.at(18.0, 1), [search.slos])
    raw, shown = (shares(result.metrics, search.slos, judge)["tbt"] for judge in ("raw", "shown"))
    assert raw < 0.99 < shown
    saved = result_dict(result)
    assert saved["playout_ms"] == 20
    assert (saved["tbt_gap_attainment"], saved["shown_tbt_gap_attainment"]) == (raw, shown)


def test_settings_with_several_values_are_so_many_systems():
    assert variants("chunked") == ["chunked"]
    assert variants("chunked:token_budget=256/512") == [
        "chunked:token_budget=256",
        "chunked:token_budget=512",
    ]
    both = variants("bullet:step_layers=2/4,schedule=true/false")
    assert both[1] == "bullet:step_layers=2,schedule=false"
    assert len(both) == 4


def test_the_best_of_several_values_has_the_highest_median():
    asked, found = "chunked:token_budget=1/2/4", {"chunked:token_budget=1": [3.0, 9.0, 4.0]}
    assert tuned([asked, "drift"], found) == {asked: "chunked:token_budget=1"}
    found |= {"chunked:token_budget=2": [5.0, 4.5, 1.0], "drift": [9.0]}
    assert tuned([asked, "drift"], found) == {asked: "chunked:token_budget=2"}
    assert tuned([asked], {one: [0.0] for one in variants(asked)}) == {}  # nothing holds


def test_the_budget_of_chunked_is_tuned_to_the_slo(tmp_path):
    """Sarathi's trade: passes must be short for a tight TBT SLO, and are better long for TTFT."""
    small, large = variants(asked := "chunked:token_budget=256/4096")
    workload = WorkloadSpec(num_prompts=8, random_input_len=2000, random_output_len=12)
    for slos, best in (({"ttft": 2.0, "tbt": 0.02}, small), ({"ttft": 0.3, "tbt": 1.0}, large)):
        folder = tmp_path / best
        search = replace(search_of(slos, tolerance=0.4), workload=workload)
        [found] = find(search, [asked], simulation(search), folder)
        assert json.loads((folder / "summary.json").read_text())["tuned"] == {asked: best}
        assert max(found.values()) == found[best]


def test_all_systems_are_sent_the_same(tmp_path):
    """At the same rate and seed: the requests of one are those of the other."""
    search = search_of({"ttft": 1.0}, requests=10, output=64, tolerance=0.2)
    seen = {}

    def run(system, workload, points):
        seen.setdefault((workload.seed, workload.request_rate), []).append(workload.build())
        return simulation(search)(system, workload, points)

    find(search, ["chunked", "prefill-first"], run, tmp_path)
    both = [asked for asked in seen.values() if len(asked) == 2]
    assert both
    assert all(first == second for first, second in both)


def test_a_run_of_a_system_that_reads_no_slo_answers_all_bounds(tmp_path):
    """The same goodput as two searches find, from fewer runs; each folder is a whole search."""
    one = search_of({"ttft": 0.4}, requests=25, output=64, tolerance=0.2, least_rate=4.0)
    search, system = replace(one, tbts=(0.008, 0.2)), "chunked:token_budget=512"
    found, runs = {}, {}

    def run(name, workload, points):
        runs[folder].append((workload.request_rate, len(points)))
        return simulation(search)(name, workload, points)

    for folder, reads in ((tmp_path / "shared", False), (tmp_path / "each", True)):
        runs[folder] = []
        rates = find(search, [system], run, folder, reads_slos=lambda _, reads=reads: reads)
        found[folder] = [one[system][0] for one in rates]
        point = json.loads((folder / "tbt8ms" / "search.json").read_text())
        assert point["slos"] == {"ttft": 0.4, "tbt": 0.008}
    shared, each = found.values()
    assert shared == each == sorted(each, reverse=True)
    assert each[0] > each[1] == 0.0  # which a lower rate than asked for would keep
    assert len(runs[tmp_path / "shared"]) < len(runs[tmp_path / "each"])
    assert {points for _, points in runs[tmp_path / "each"]} == {1}


@pytest.mark.full
def test_guesses_spare_runs_and_correct_each_other(tmp_path):
    """Each seed begins at its own guess, by how much the one before was off; the same is found."""
    search = search_of({"ttft": 1.0}, requests=40, seeds=3, tolerance=0.06)
    system, runs = "chunked", {}

    def run(name, workload, points):
        runs[folder].append((workload.seed, workload.request_rate))
        return simulation(search)(name, workload, points)

    found = []
    for folder, off in ((tmp_path / "plain", None), (tmp_path / "guessed", 0.8)):
        runs[folder] = []
        guesses = [] if off is None else [off * rate for rate in found[0]]
        found.append(find(search, [system], run, folder, guesses=guesses)[0][system])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
    guessed = runs[tmp_path / "guessed"]
    assert guessed[0][1] == pytest.approx(0.8 * found[0][0], rel=0.03)
    begins = dict(reversed(guessed))  # the first of each seed
    assert [begins[seed] for seed in (1, 2)] == pytest.approx(found[0][1:])
    assert [seed for seed, _ in guessed if seed] == [1, 1, 2, 2]


def test_a_folder_of_several_bounds_is_checked_too(tmp_path):
    search = replace(search_of({"ttft": 1.0}, requests=5), tbts=(0.1,))
    find(search, ["chunked"], simulation(search), tmp_path)
    with pytest.raises(FieldError, match="another search"):
        find(replace(search, tolerance=0.3), ["chunked"], simulation(search), tmp_path)
    for wrong in ({"tbts": (0.0,)}, {"slos": {"tbt": 1.0}}):
        with pytest.raises(FieldError, match="tbt"):
            replace(search, **wrong).check()


def test_the_command(tmp_path):
    arguments = [
        "goodput",
        "--simulate",
        "h100",
        "--model",
        "llama-3.1-8b",
        "--num-prompts",
        "10",
        "--max-output-len",
        "64",
        "--brief",
    ]
    arguments += ["--system", "chunked:token_budget=512", "--system", "static-split"]
    arguments += ["--out", str(tmp_path), "--goodput", "ttft:800", "tbt:90", "--tolerance", "0.5"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert set(saved["goodput"]) == {"chunked:token_budget=512", "static-split"}
    assert saved["search"]["slos"] == {"ttft": 0.8, "tbt": 0.09}
    assert "a first look" in done.output


def test_the_command_takes_the_rule_for_first_tokens_and_several_bounds(tmp_path):
    arguments = [
        "goodput",
        "--simulate",
        "h100",
        "--model",
        "llama-3.1-8b",
        "--num-prompts",
        "10",
        "--max-output-len",
        "64",
        "--brief",
    ]
    arguments += [
        "--out",
        str(tmp_path),
        "--tolerance",
        "0.5",
        "--system",
        "chunked",
        "--seed",
        "3",
    ]
    done = CliRunner().invoke(
        app, [*arguments, "--goodput", "ttft:50", "ttft-per-1k:40", "tbt:20/60"]
    )
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "ttft 50 ms + 40 per 1K new tokens" in said
    saved = json.loads((tmp_path / "tbt60ms" / "summary.json").read_text())
    assert saved["search"]["slos"] == {"ttft": 0.05, "ttft_per_1k": 0.04, "tbt": 0.06}
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("tbt60ms/*-seed3-rate*.json")]
    assert runs
    assert all(run["slos_ms"]["ttft_per_1k"] == 40 for run in runs)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--goodput"),
        (["--goodput", "tbt:5/9", "--goodput", "tbt:7"], "given twice"),
        (["--goodput", "ttft-per-1k:5", *SIMULATED], "ttft"),
        (["--goodput", "ttft:500", "--system", "chunked"], "needs --serve"),
        (["--goodput", "ttft:500", "--simulate", "h200"], "--model"),
        (["--goodput", "ttft:5", *SIMULATED, "--serve", "x"], "--simulate exclude each other"),
        (["--goodput", "ttft:5", *SIMULATED, "--base-url", "http://x"], "--base-url excludes"),
        (["--goodput", "ttft:500", "--seeds", "0"], "--seeds"),
        (["--goodput", "ttft:5", *SIMULATED, "--system", "drift:groups=3,groups=4"], "twice"),
        (["--goodput", "ttft:5", "--seeds", "2", "--guess", "1", *SIMULATED], "--guess"),
        (["--goodput", "ttft:500", "--simulate", "x", "--model", "llama-3.1-8b"], "there are"),
    ],
)
def test_what_is_wrong_is_said(arguments, complaint, tmp_path):
    done = CliRunner().invoke(app, ["goodput", "--out", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert complaint in done.output + done.stderr
