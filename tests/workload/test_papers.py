"""The papers' workloads, drawn from what the papers publish."""

import itertools

import numpy as np
import pytest
from typer.testing import CliRunner

from twolane.cli.main import app
from twolane.common.errors import FieldError
from twolane.workload.draws import STRATA, Lengths, spread
from twolane.workload.papers import WORKLOADS, Single
from twolane.workload.prompts import PromptMaker, TokenRange
from twolane.workload.published import PUBLISHED, Statistics, reused_tokens, statistics
from twolane.workload.spec import WorkloadSpec
from twolane.workload.traces import TraceRequest


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PUBLISHED)
def test_drawn_lengths_are_the_published_ones(name, seed):
    drawn = statistics(WorkloadSpec(dataset=name, num_prompts=20_000, seed=seed).build())
    missed = {length: wanted.misses(drawn[length]) for length, wanted in PUBLISHED[name].items()}
    assert not any(missed.values()), missed


def test_all_generated_workloads_are_checked():
    assert set(WORKLOADS) <= set(PUBLISHED)


def test_a_miss_is_named():
    published = Statistics(minimum=10, mean=100, maximum=200, median=90)
    assert published.misses(Statistics(10, 97.1, 200, 92.6)) == []
    assert published.misses(Statistics(9, 96.9, 201, 92.8)) == [
        "mean",
        "median",
        "minimum",
        "maximum",
    ]


def test_draws_are_spread_evenly_and_begin_alike():
    rows = spread(np.random.default_rng(5), 2 * STRATA, 3)
    for row in rows:
        for half in np.split(row, 2):
            assert sorted((half * STRATA).astype(int)) == list(range(STRATA))
    assert np.array_equal(rows[:, :100], spread(np.random.default_rng(5), 100, 3))
    assert abs(np.corrcoef(rows)[0, 1]) < 0.1


def test_the_mean_of_lengths_is_the_one_asked_for():
    lengths = Lengths(100, 900, 100_000, 2.0).at((np.arange(50_000) + 0.5) / 50_000)
    assert lengths.mean() == pytest.approx(900, rel=0.01)
    assert lengths.min() == 100
    assert lengths.max() <= 100_000


@pytest.mark.parametrize("name", [name for name, of in WORKLOADS.items() if isinstance(of, Single)])
def test_a_short_draw_of_single_turns_begins_a_long_one(name):
    assert WORKLOADS[name].draw(1500, 3)[:200] == WORKLOADS[name].draw(200, 3)


def test_openthoughts_share_their_system_prompt_and_nothing_else():
    one, two = WORKLOADS["openthoughts"].draw(2, seed=0)
    maker = PromptMaker(TokenRange(), seed=0)
    first, second = maker.token_ids(0, one), maker.token_ids(1, two)
    assert (len(first), len(second)) == (one.prompt_tokens, two.prompt_tokens)
    assert first[:243] == second[:243]
    assert not set(one.hash_ids[1:]) & set(two.hash_ids[1:])
    assert first[243:259] != second[243:259]


@pytest.mark.parametrize("name", ["conversation", "toolagent"])
class TestSessions:
    def test_they_repeat_and_arrive_in_order(self, name):
        requests = WORKLOADS[name].draw(2000, seed=4)
        assert requests == WORKLOADS[name].draw(2000, seed=4)
        assert requests != WORKLOADS[name].draw(2000, seed=5)
        assert len(requests) == 2000
        times = [request.arrival for request in requests]
        assert times == sorted(times)
        rate = WORKLOADS[name].request_rate
        assert np.median(times) == pytest.approx(1000 / rate, rel=0.4)  # later turns come late

    def test_a_turn_stands_on_the_turn_before(self, name):
        requests = WORKLOADS[name].draw(2000, seed=4)
        context = WORKLOADS[name].contexts * WORKLOADS[name].context_blocks[1]
        owner: dict[int, TraceRequest] = {}
        later = 0
        for request in requests:
            assert len(request.hash_ids) == -(-request.prompt_tokens // request.block_tokens)
            own = [block for block in request.hash_ids if block >= context]
            before = [owner[block] for block in own if block in owner]
            for _, last in itertools.groupby(before, key=id):
                turn = next(last)
                later += 1
                assert turn.arrival < request.arrival
                assert turn.prompt_tokens + turn.output_tokens < request.prompt_tokens
                full = turn.prompt_tokens // turn.block_tokens
                assert request.hash_ids[:full] == turn.hash_ids[:full]
            owner |= dict.fromkeys(own, request)
        assert later > 300

    def test_a_rate_keeps_the_order_of_turns(self, name):
        own = WorkloadSpec(dataset=name, num_prompts=300).build()
        rated = WorkloadSpec(dataset=name, num_prompts=300, request_rate=5.0).build()
        assert [r.hash_ids for r in own] == [r.hash_ids for r in rated]
        assert rated[-1].arrival == pytest.approx(60)

    def test_windows_of_a_trace_are_refused(self, name):
        with pytest.raises(FieldError, match="trace_offset"):
            WorkloadSpec(dataset=name, trace_offset=1.0).build()


def test_reuse_is_counted_in_leading_blocks():
    requests = [
        TraceRequest(0.0, 1000, 1, (1, 2)),
        TraceRequest(1.0, 1600, 1, (1, 2, 3, 4)),
        TraceRequest(2.0, 1600, 1, (1, 9, 3, 4)),
        TraceRequest(3.0, 600, 1, (1, 2)),
    ]
    assert reused_tokens(requests) == [0, 1024, 512, 600]


def test_the_command_prints_all_and_ends_with_1_on_a_miss():
    run = CliRunner().invoke(
        app, ["bench", "workloads", "--num-prompts", "20"], env={"COLUMNS": "160"}
    )
    assert run.exit_code == 1
    for name in PUBLISHED:
        assert name in run.output
    assert "mean" in run.output
