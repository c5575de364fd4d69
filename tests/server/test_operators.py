"""What operators choose: unknown fields, the prefix cache's end, load, and what is not served."""

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
from codecs import BOM_UTF8
from io import BytesIO, FileIO

import pytest

from twolane.engine.config import EngineConfig
from twolane.model.load.hub import PullError
from twolane.server.batch import Answered, answer_all, kept_answers, lines_of, run_batch
from twolane.server.openai.refused import REFUSED
from twolane.server.options import ServerOptions

from .conftest import TINY
from .parrot import Learnt, write_parrot
from .serving import PATIENCE, serving, wait_for
from .test_lifecycle import Stream

SPAIN = [{"role": "user", "content": "What is the capital of Spain?"}]
LEARNT = [Learnt("Spain", "Madrid.")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_parrot(tmp_path_factory.mktemp("parrot") / "model", LEARNT))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    arguments = ("--kv-tokens", "20000", "--unknown-fields", "warn", "--admin-endpoints")
    with serving(model, *arguments, stderr=log) as server:
        server.log = log
        yield server


def ask(server, **fields):
    body = {"messages": SPAIN, "temperature": 0, "max_tokens": 20, **fields}
    return server.request("/v1/chat/completions", body)


def test_unknown_fields_have_no_effect_and_are_told_once(server):
    for _ in range(2):
        status, _, answer = ask(server, keep_alive="5m", messages=[{**SPAIN[0], "nope": 1}])
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == "Madrid."
    log = server.log.read_text()
    assert log.count("'keep_alive'") == log.count("'nope'") == 1
    large = [{**SPAIN[0], "large": "x" * 70_000}, *SPAIN]
    assert ask(server, messages=large)[0] == 200
    status, _, answer = ask(server, suffix="x", request_id="a")  # known, and not served
    assert (status, answer["error"]["param"]) == (400, "request_id")


def test_the_prefix_cache_can_be_emptied(server):
    def cached():
        return ask(server)[2]["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert server.request("/reset_prefix_cache", {})[0] == 200
    assert cached() == 0
    assert cached() > 0


def test_load_says_how_busy_the_server_is(server):
    for path in ("/load", "/v1/load"):
        told = wait_for(lambda path=path: at_rest(server.request(path)[2]))
        assert told["kv_cache_dtype"] == "auto"
    stream = Stream(server, {"prompt": [5], "max_tokens": 15_000, "ignore_eos": True})
    wait_for(lambda: busy_with_one(server.request("/load")[2]))
    stream.close()
    wait_for(lambda: at_rest(server.request("/load")[2]))


def at_rest(load):
    """What a server says of its load, if it has none and all pages are free."""
    return load if load["server_load"] == 0 and load["kv_pages_free"] == load["kv_pages"] else None


def busy_with_one(load):
    """Whether a server says that it has one request, which decodes and has pages."""
    return load["server_load"] == load["running"] == 1 and load["kv_pages_free"] < load["kv_pages"]


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_served_is_refused_with_the_reason(server, path):
    for body in ({"input": "x"}, None):  # without a body it is a GET
        status, _, answer = server.request(path, body)
        assert (status, answer["error"]["code"]) == (501, "not_served")
        assert path in answer["error"]["message"]


def test_by_default_nobody_empties_the_prefix_cache(tiny):
    status, _, body = tiny.request("/reset_prefix_cache", {})
    assert status == 404
    assert "--admin-endpoints" in str(body)


def test_a_batch_file_is_answered(model, tmp_path):
    chat = {"messages": SPAIN, "temperature": 0, "max_tokens": 20, "priority": 1}
    lines = [
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "wrong", "url": "/v1/chat/completions", "body": {**chat, "n": 0}},
        {"custom_id": "stream", "url": "/v1/chat/completions", "body": {**chat, "stream": True}},
        {"custom_id": "url", "url": "/v1/moderations", "body": {}},
        {"custom_id": "no body", "url": "/v1/responses", "body": None},
        *[{"custom_id": f"{i}", "url": "/v1/responses", "body": RESPONSE} for i in range(5)],
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [json.dumps({"method": "POST", **line}) for line in lines]
    odd = ["no JSON", '{"body": ' + "[" * 5000]
    text = BOM_UTF8 + "\n".join([*texts, "", *odd]).encode()
    source.write_bytes(text + b'\n{"url": "\xff"}\n')
    command = [sys.executable, "-m", "twolane", "run-batch", model, str(source), str(target)]
    options = ("--device", "cpu", "--kv-tokens", "20000", "--concurrency", "3")
    run = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "6 completed, 7 failed" in run.stderr
    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert answers.keys() == {line["custom_id"] for line in lines} | {None}
    told = answers["chat"]["response"]
    assert told["status_code"] == 200
    assert told["body"]["choices"][0]["message"]["content"] == "Madrid."
    assert answers["3"]["response"]["body"]["output"][0]["content"][0]["text"] == "Madrid."
    assert answers["wrong"]["response"]["body"]["error"]["param"] == "n"
    assert "stream" in answers["stream"]["error"]["message"]
    assert answers["url"]["error"]["code"] == "invalid_request"
    for line in (None, "no body"):
        assert answers[line]["error"]["code"] == "invalid_line"


def test_a_batch_that_cannot_start_takes_nothing_from_its_files(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    other, before = tmp_path / "asked.jsonl", '{"id":"batch_req_0"}\n{"id":"ba'
    source.write_text("asked")
    other.write_text(f'{before}tch_req_1"}}\n{{"custom_id":"1"}}\n')
    target.write_text(before)
    for out, lora, problem in (
        (source, {}, "the requests' file"),
        (other, {}, "line 3 of .*asked.jsonl is not an answer"),
        (target, {}, "nowhere"),
        (target, {"mine": str(tmp_path)}, "mine is the name of the model itself"),
    ):
        config = EngineConfig(model="nowhere", lora=lora)
        options = ServerOptions(served_model_names=("other", "mine") if lora else ())
        with pytest.raises((ValueError, PullError), match=problem):
            asyncio.run(run_batch(config, options, source, out, 1))
    assert (source.read_text(), target.read_text()) == ("asked", before)
    assert len(other.read_text().splitlines()) == 3
    with target.open("ab") as held, pytest.raises(ValueError, match="another run"):
        fcntl.flock(held, fcntl.LOCK_EX)
        asyncio.run(run_batch(EngineConfig(model="nowhere"), ServerOptions(), source, target, 1))
    assert target.read_text() == before


class Bounded(FileIO):
    """A file on a disk that takes this many bytes, and parts of lines."""

    room = 1000

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(data[: min(self.room, 700)])
        self.room -= written
        return written


def test_a_batch_whose_disk_is_full_keeps_whole_lines(tmp_path):
    calls = iter(range(3))

    async def app(scope, receive, send):
        if next(calls) == 0:
            await asyncio.Event().wait()  # which holds no end up
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'"%b"' % (b"x" * 700)})

    asked = [{"custom_id": id, "url": "/v1/completions", "body": {}} for id in "abc"]

    async def run(out):
        try:
            await answer_all(app, lines, out, 2)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    lines = lines_of(BytesIO("\n".join(map(json.dumps, asked)).encode()))
    with Bounded(tmp_path / "out", "ab") as out, pytest.raises(OSError, match="out") as failed:
        asyncio.run(run(out))
    assert failed.value.errno == errno.ENOSPC
    [answer] = (tmp_path / "out").read_bytes().splitlines()
    assert json.loads(answer)["custom_id"] == "b"


def test_a_line_of_a_batch_is_as_strict_as_a_body(tmp_path):
    bodies = []

    async def app(scope, receive, send):
        bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    url = '"url": "/v1/completions"'
    large = f'{{"custom_id": "a", {url}, "body": {{"n": 1{"0" * 30}}}}}'
    lines = [
        large,
        large,
        f'{{"custom_id": "b", {url}, "body": {{"n": 1, "n": 2}}}}',
        f'{{"custom_id": "c", {url}, "body": {{}}, "priority": 1}}',
    ]
    with (tmp_path / "out").open("ab", buffering=0) as out:
        source = lines_of(BytesIO("\n\n".join(lines).encode()))
        assert asyncio.run(answer_all(app, source, out, 1)) == (1, 3)
    answers = map(json.loads, (tmp_path / "out").read_text().splitlines())
    first, *errors = [answer["error"] for answer in answers]
    assert first is None
    assert [error["code"] for error in errors] == ["duplicate_custom_id", *["invalid_line"] * 2]
    for error, said in zip(errors, ("line 3: an earlier line", "'n'", "priority"), strict=True):
        assert said in error["message"]
    assert bodies == [b'{"n": 1' + b"0" * 30 + b"}"]


def test_a_batch_that_was_killed_goes_on_with_what_is_not_answered(tmp_path):
    """A line that has changed, a half answer, one that failed and one of another model are none."""
    asked, failures = [], [503]

    async def app(scope, receive, send):
        asked.append(json.loads((await receive())["body"])["prompt"])
        status = failures.pop() if asked[-1] == "fails" and failures else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"text": "%d"}' % len(asked)})

    def run(prompts, settings=b"model a"):
        asked.clear()
        lines = [
            {"custom_id": f"r{i}", "url": "/v1/completions", "body": {"prompt": prompt}}
            for i, prompt in enumerate(prompts)
        ]
        file = BytesIO("\n".join(map(json.dumps, lines)).encode())
        answered, source = kept_answers(out, Answered(settings), file), lines_of(file)
        with out.open("ab", buffering=0) as into:
            counts = asyncio.run(answer_all(app, source, into, 1, answered))
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        assert sorted(answer["custom_id"] for answer in answers) == [
            line["custom_id"] for line in lines
        ]
        return counts, {answer["custom_id"]: answer["response"]["body"] for answer in answers}

    out = tmp_path / "out.jsonl"
    out.write_text('{"id":"batch_req_0"}\n')
    counts, first = run(["a", "fails", "c", "d"])
    assert (counts, asked) == ((3, 1), ["a", "fails", "c", "d"])
    whole = out.read_bytes()
    out.write_bytes(whole[:-10])
    counts, second = run(["a", "fails", "c", "d"])
    assert (counts, asked) == ((4, 0), ["fails", "d"])
    assert [second[id] for id in ("r0", "r2")] == [first[id] for id in ("r0", "r2")]
    assert run(["a", "fails", "c", "d"]) == ((4, 0), second)
    assert asked == []
    run(["a", "b", "c", "d"], b"model b")
    assert asked == ["a", "b", "c", "d"]


@pytest.mark.full
def test_a_batch_is_answered_once_unless_it_is_started_anew(tiny_model, tmp_path):
    body = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
    lines = [{"custom_id": f"{i}", "url": "/v1/completions", "body": body} for i in range(5)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    command = [
        sys.executable,
        "-m",
        "twolane",
        "run-batch",
        str(tiny_model),
        str(source),
        str(target),
    ]
    ids = []
    for more in ((), (), ("--restart",)):
        run = subprocess.run([*command, *TINY, *more], capture_output=True, text=True, timeout=120)
        assert "5 completed, 0 failed" in run.stderr, run.stderr
        created = [
            json.loads(line)["response"]["body"]["id"] for line in target.read_text().splitlines()
        ]
        ids.append(created)
    assert ids[0] == ids[1]
    assert not {*ids[1]} & {*ids[2]}


def test_a_batch_from_a_pipe_answers_while_its_writer_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("twolane.server.batch.MAX_PIPED_LINE", 100)
    answered = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        answered.set()

    async def run(out):
        coming, going = os.pipe()
        with os.fdopen(coming, "rb") as source, os.fdopen(going, "wb", 0) as writer:
            answering = asyncio.create_task(answer_all(app, lines_of(source, waits=True), out, 2))
            writer.write(b'\n{"custom_id": "a", "url": "/v1/completions", "body": {}}\n')
            await asyncio.wait_for(answered.wait(), PATIENCE)
            writer.write(b"x" * 1000 + b"\n")
            with pytest.raises(ValueError, match="line 3 has more than 100 bytes"):
                await answering

    with (tmp_path / "out").open("ab", buffering=0) as out:
        asyncio.run(run(out))
    [answer] = (tmp_path / "out").read_text().splitlines()
    assert json.loads(answer)["custom_id"] == "a"


RESPONSE = {"input": SPAIN[0]["content"], "temperature": 0}
