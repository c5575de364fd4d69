"""The client against a scripted server over real sockets; every figure is the script's."""

import json

import pytest

from twolane.bench.serve import BenchError
from twolane.results.record import Record
from twolane.results.summary import result_json
from twolane.workload.prompts import TokenRange

from .scripted import (
    BREAK,
    DONE,
    EXPIRE,
    STALL,
    bench,
    delta,
    event,
    expire_timeouts,
    text,
    usage,
)


def outcome_of(script, **config) -> Record:
    result, _ = bench(script, **config)
    (record,) = result.records
    return record


def approx(values):
    return pytest.approx(list(values), abs=1e-9)


def test_completions_timeline():
    def script(number, body):
        return [
            (0.5, text("a")),
            (0.6, text("b")),
            (0.9, text("c", "length")),
            (1.0, usage(4, 3)),
            (1.1, DONE),
        ]

    result, server = bench(script, spec={"random_output_len": 3})
    (record,) = result.records
    assert (record.outcome, record.error, record.text) == ("ok", "", "abc")
    assert record.sent == 0.0
    assert list(record.token_times) == approx([0.5, 0.6, 0.9])
    assert record.ended == pytest.approx(1.1)
    assert record.tpot == pytest.approx(0.3)
    assert (record.prompt_tokens, record.output_tokens) == (4, 3)
    assert result.model == "scripted-model"
    (body,) = server.bodies
    assert len(body["prompt"]) == 4
    assert all(1000 <= token < 30000 for token in body["prompt"])
    assert (body["model"], body["max_tokens"]) == ("scripted-model", 3)
    assert (body["stream"], body["ignore_eos"]) == (True, True)
    assert body["stream_options"] == {"include_usage": True}


def test_chat_timeline_starts_at_the_first_token_not_at_the_role():
    def script(number, body):
        return [
            (0.1, delta(role="assistant", content="")),
            (0.7, delta(content="Paris")),
            (0.8, delta(content=".")),
            (0.8, delta("stop")),
            (0.9, usage(12, 2)),
            (0.9, DONE),
        ]

    result, server = bench(script, endpoint="/v1/chat/completions", ignore_eos=False)
    (record,) = result.records
    assert list(record.token_times) == approx([0.7, 0.8])
    assert (record.text, record.prompt_tokens) == ("Paris.", 12)
    (message,) = server.bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 4
    assert "ignore_eos" not in server.bodies[0]


def test_reasoning_and_tool_calls_are_tokens():
    def script(number, body):
        return [
            (0.2, delta(reasoning_content="hm")),
            (0.3, delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}])),
            (0.3, delta("tool_calls")),
            (0.3, DONE),
        ]

    record = outcome_of(script, endpoint="/v1/chat/completions")
    assert list(record.token_times) == approx([0.2, 0.3])


def test_chunks_without_text():
    def script(number, body):
        return [
            (0.1, text("")),  # a sign of life
            (0.5, text("a")),
            (0.6, text("")),  # half a character
            (0.7, text("é", "length")),
            (0.7, DONE),
        ]

    assert list(outcome_of(script).token_times) == approx([0.5, 0.6, 0.7])


def test_answers_that_print_nothing_are_timed_by_their_chunks():
    def script(number, body):
        return [(0.1, text("")), (0.3, text("")), (0.4, text("", "length")), (0.4, DONE)]

    assert list(outcome_of(script).token_times) == approx([0.1, 0.3])
    single = outcome_of(lambda number, body: [(0.4, text("", "length")), (0.4, DONE)])
    assert list(single.token_times) == approx([0.4])


def test_events_cut_across_network_chunks():
    whole = text("héllo")
    cut = whole.index("é".encode()) + 1 if "é".encode() in whole else 20

    def script(number, body):
        return [
            (0.1, b": keep-alive\n\n"),
            (0.2, whole[:cut]),
            (0.3, whole[cut:-1]),
            (0.4, whole[-1:] + text("b")[:7]),
            (0.5, text("b")[7:] + text("c", "stop") + usage(4, 3)),
            (0.6, b"data: [DO"),
            (0.7, b"NE]"),
        ]

    record = outcome_of(script)
    assert record.outcome == "ok"
    assert list(record.token_times) == approx([0.4, 0.5, 0.5])
    assert record.ended == pytest.approx(0.7)


def test_several_tokens_in_a_chunk():
    def script(number, body):
        return [(1.0, text("abc")), (2.0, text("def", "length")), (2.0, usage(4, 6)), (2.0, DONE)]

    record = outcome_of(script)
    assert record.gaps == approx([1.0])
    assert record.tpot == pytest.approx(0.2)


def test_server_without_usage_and_without_done():
    record = outcome_of(lambda number, body: [(0.5, text("a")), (0.7, text("b", "stop"))])
    assert record.outcome == "ok"
    assert (record.usage_output, record.output_tokens) == (None, 2)
    assert record.ended == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("script", "outcome", "said"),
    [
        ((429, "queue is full"), "status_429", "queue is full"),
        ((400, "too long"), "status_400", "too long"),
        ((503, "loading"), "status_503", "loading"),
        ([(0.1, text("a")), (0.2, BREAK)], "disconnect", ""),
        ([(0.1, BREAK)], "disconnect", ""),
        ([(0.1, text("a"))], "disconnect", "before the answer"),
        ([(0.1, text("a")), (0.2, b"data: {oops\n\n")], "malformed", "oops"),
        ([(0.1, b'data: {"choices": [{"text": 7}]}\n\n')], "malformed", "text"),
        ([(0.1, b"data: [1]\n\n")], "malformed", ""),
        ([(0.1, DONE)], "malformed", "no token"),
        ([(0.1, text("a")), (0.2, event({"error": {"message": "dead"}}))], "stream_error", "dead"),
        ([(0.1, b"event: error\ndata: engine died\n\n")], "stream_error", "engine died"),
    ],
)
def test_failures(script, outcome, said):
    record = outcome_of(lambda number, body: script)
    assert record.outcome == outcome
    assert said in record.error


def test_a_stall_ends_in_a_timeout_and_keeps_what_came():
    record = outcome_of(lambda number, body: [(0.5, text("a")), (0.5, EXPIRE), (0.5, STALL)])
    assert record.outcome == "timeout"
    assert list(record.token_times) == approx([0.5])


def test_a_connection_left_open_after_the_answer_costs_nothing():
    record = outcome_of(
        lambda number, body: [(0.5, text("a", "stop")), (0.6, DONE), (0.6, STALL)], timeout=60.0
    )
    assert record.outcome == "ok"
    assert record.ended == pytest.approx(0.6)


def test_an_answer_that_is_no_stream_is_malformed():
    record = outcome_of(lambda number, body: (200, "not streaming"))
    assert record.outcome == "malformed"
    assert "application/json" in record.error


def one_token(number, body):
    return [(float(number + 1), text("a", "length")), (float(number + 1), DONE)]


def test_every_request_sent_has_one_outcome():
    scripts = [
        (429, "full"),
        [(1.0, text("a", "stop")), (1.0, DONE)],
        [(2.0, text("a")), (2.0, BREAK)],
        [(3.0, b"data: ?\n\n")],
    ]
    result, server = bench(lambda number, body: scripts[number % 4], spec={"num_prompts": 40})
    assert len(server.bodies) == 40
    assert [record.index for record in result.records] == list(range(40))
    assert result.metrics.outcomes == {
        "status_429": 10, "ok": 10, "disconnect": 10, "malformed": 10,
    }  # fmt: skip


def test_bound_on_concurrency_is_kept_and_waiting_is_not_lag():
    result, _ = bench(one_token, spec={"num_prompts": 5}, max_concurrency=1)
    assert result.metrics.max_concurrent == 1
    assert [record.sent for record in result.records] == approx(range(5))
    assert [record.waited for record in result.records] == approx(range(5))
    assert [record.lag for record in result.records] == approx([0.0] * 5)
    assert [record.ttft for record in result.records] == approx([1.0] * 5)


def test_open_loop_sends_without_waiting_for_answers():
    seen = []

    def script(number, body):
        seen.append(number)
        return [(1.0, EXPIRE), (1.0, STALL)] if number == 29 else [(0.0, STALL)]

    result, _ = bench(script, spec={"num_prompts": 30}, max_concurrency=None)
    assert len(seen) == 30
    assert result.metrics.max_concurrent == 30
    assert result.metrics.outcomes == {"timeout": 30}


def test_stopping_keeps_what_was_measured():
    def script(number, body):
        return [(0.5, text("a")), (0.5, STALL)] if number == 2 else one_token(number, body)

    result, _ = bench(script, spec={"num_prompts": 10}, stop_when_stalled=True)
    assert result.interrupted
    assert [record.outcome for record in result.records] == ["ok", "ok", "interrupted"]
    assert len(result.workload) == 10
    assert result.metrics.sent == 3


def test_a_loop_that_stands_still_while_it_measures_lags():
    def slow(record):
        if record.index == 0:
            expire_timeouts()

    result, _ = bench(one_token, spec={"num_prompts": 2}, on_record=slow)
    assert result.loop_lag.max > 1800


def test_closing_what_is_open_is_no_lag_of_the_loop():
    def slow(record):
        if record.outcome == "interrupted":
            expire_timeouts()

    stalled = [(0.5, text("a")), (0.5, STALL)]
    result, _ = bench(lambda *_: stalled, stop_when_stalled=True, on_record=slow)
    assert result.metrics.outcomes == {"interrupted": 1}
    assert (result.loop_lag.max or 0.0) < 1800


def test_headers_key_body_and_seed():
    settings = {
        "api_key": "secret",
        "headers": {"X-Trace": "7"},
        "extra_body": {"temperature": 0},
        "vocab_range": TokenRange(5, 9),
    }
    _, first = bench(one_token, spec={"num_prompts": 2}, **settings)
    _, again = bench(one_token, spec={"num_prompts": 2}, **settings)
    _, other = bench(one_token, spec={"num_prompts": 2, "seed": 1})
    assert first.headers[0]["Authorization"] == "Bearer secret"
    assert first.headers[0]["X-Trace"] == "7"
    assert first.bodies[0]["temperature"] == 0
    assert set(first.bodies[0]["prompt"]) <= {5, 6, 7, 8}
    assert [b["prompt"] for b in first.bodies] == [b["prompt"] for b in again.bodies]
    assert first.bodies[0]["prompt"] != other.bodies[0]["prompt"]


def test_text_prompts():
    _, server = bench(one_token, prompt_format="text")
    assert len(server.bodies[0]["prompt"].split()) == 4


def test_warm_ups_come_first_and_share_no_prompt():
    result, server = bench(one_token, spec={"num_prompts": 2}, num_warmups=3)
    prompts = [json.dumps(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 5
    assert len(result.records) == 2
    with pytest.raises(BenchError, match="status_429"):
        bench(lambda number, body: (429, "full"), num_warmups=1)
    with pytest.raises(BenchError, match="status_500"):
        bench(
            lambda number, body: (500, "bad") if number == 1 else one_token(number, body),
            num_warmups=3,
        )


def test_a_run_that_is_stopped_while_it_warms_up_has_sent_nothing():
    """It is an interrupted run like any other, and no failure of the server's."""
    result, server = bench(
        lambda number, body: [(0.1, STALL)], stop_when_stalled=True, num_warmups=2
    )
    assert result.interrupted
    assert result.records == ()
    assert len(server.bodies) == 1
    assert json.loads(result_json(result))["completed"] == 0


def test_some_warm_ups_may_be_refused():
    """Many at once are more than a server may promise to serve in time."""
    result, server = bench(
        lambda number, body: (429, "full") if number in (1, 2) else one_token(number, body),
        spec={"num_prompts": 2},
        num_warmups=3,
    )
    assert len(server.bodies) == 5
    assert [record.outcome for record in result.records] == ["ok", "ok"]


def test_shared_blocks_reach_the_server(tmp_path):
    trace = tmp_path / "trace"
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 3]},
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    spec = {"dataset": str(trace), "num_prompts": None, "random_input_len": None}
    _, server = bench(one_token, spec=spec)
    first, second = (body["prompt"] for body in server.bodies)
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


def test_the_role_is_no_token_even_if_nothing_is_printed():
    def script(number, body):
        return [
            (0.1, delta(role="assistant", content="")),
            (0.4, delta(content="")),
            (0.6, delta(content="")),
            (0.6, delta("length")),
            (0.6, DONE),
        ]

    record = outcome_of(script, endpoint="/v1/chat/completions")
    assert list(record.token_times) == approx([0.4, 0.6])


def counted(*counts):
    """A stream whose chunks have usage up to these numbers of tokens, all of one character."""
    body = json.loads(text("a")[len("data: ") :])
    chunks = [{**body, "usage": {"prompt_tokens": 4, "completion_tokens": n}} for n in counts]
    events = [(0.1 * (i + 1), event(chunk)) for i, chunk in enumerate(chunks)]
    return [*events, (0.9, text("", "length")), (0.9, usage(4, counts[-1])), (0.9, DONE)]


def test_usage_with_each_chunk_tells_how_many_tokens_it_has():
    record = outcome_of(lambda number, body: counted(1, 4, 5), spec={"random_output_len": 5})
    assert record.chunk_tokens == (1, 3, 1)
    assert record.counted
    assert record.arrivals == approx([0.1, 0.2, 0.2, 0.2, 0.3])


def test_it_is_asked_for_where_a_playout_buffer_needs_it():
    more = {"goodput": {"tbt": 0.2}, "playout": 0.2}
    _, server = bench(lambda number, body: counted(1, 2), **more)
    (body,) = server.bodies
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert body["stream_options"] == options


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_has_failed(reason):
    def script(number, body):
        return [(0.1, text("a")), (0.2, text("", reason)), (0.3, usage(4, 1)), (0.3, DONE)]

    record = outcome_of(script)
    assert record.outcome == "stream_error"
    assert reason in record.error


def test_a_usage_of_no_tokens_is_not_believed():
    def script(number, body):
        return [(0.1, text("a")), (0.2, text("b", "length")), (0.3, usage(0, 0)), (0.3, DONE)]

    record = outcome_of(script)
    assert record.output_tokens == 2
    assert record.prompt_tokens == record.asked_prompt > 0
    assert record.tpot == pytest.approx(0.2)


@pytest.mark.parametrize("first", ["a", ""])
def test_a_chunk_without_text_has_its_tokens_too(first):
    def script(number, body):
        base = json.loads(text("a")[len("data: ") :])
        usages = [{"prompt_tokens": 4, "completion_tokens": n} for n in (1, 2, 3)]
        chunks = [{**json.loads(json.dumps(base)), "usage": one} for one in usages]
        for chunk, piece in zip(chunks, (first, "", first), strict=True):
            chunk["choices"][0]["text"] = piece
        events = [(0.1 * (i + 1), event(chunk)) for i, chunk in enumerate(chunks)]
        return [*events, (0.4, text("", "length")), (0.5, usage(4, 3)), (0.5, DONE)]

    record = outcome_of(script, spec={"random_output_len": 3})
    assert record.chunk_tokens == (1, 1, 1)
    assert record.arrivals == approx([0.1, 0.2, 0.3])
