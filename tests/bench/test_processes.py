"""A load that several processes send, against a server on real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from twolane.bench import processes
from twolane.bench.client import Job
from twolane.bench.serve import run
from twolane.results.record import Record
from twolane.results.result import BenchConfig
from twolane.workload.spec import WorkloadSpec


@contextlib.asynccontextmanager
async def server(asked: list[Any], seconds: float) -> AsyncIterator[str]:
    """A server that answers each request with three tokens, and takes some seconds for it."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] > 1:
            asked.append((request.transport.get_extra_info("peername"), body["prompt"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in "abc":
            await response.write(
                b"data: %b\n\n" % json.dumps({"choices": [{"text": part}]}).encode()
            )
            await asyncio.sleep(seconds / 3)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer), web.get("/v1/models", models)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def load(url: str, requests: int) -> BenchConfig:
    spec = WorkloadSpec(dataset="random", num_prompts=requests, random_output_len=3)
    return BenchConfig(base_url=url, workload=spec, num_warmups=0)


def test_every_request_is_sent_once_and_counts_from_one_start(monkeypatch) -> None:
    monkeypatch.setattr(processes, "TOKENS_PER_PROCESS", 2.0)
    monkeypatch.setattr(processes, "usable_cores", lambda: [0, 1])
    asked: list[Any] = []
    told: dict[str, list[Any]] = {"record": [], "first": [], "sent": []}

    async def main() -> Any:
        async with server(asked, 0.0) as url:
            return await run(
                load(url, 12),
                on_record=told["record"].append,
                on_first=lambda index, ttft: told["first"].append((index, ttft)),
                on_change=lambda tally: told["sent"].append(tally.sent),
            )

    result = asyncio.run(main())
    assert [record.index for record in result.records] == [*range(12)]
    assert all(record.ok and record.text == "abc" for record in result.records)
    assert sorted(told["record"], key=lambda record: record.index) == [*result.records]
    assert sorted(index for index, _ in told["first"]) == [*range(12)]
    assert max(told["sent"]) == 12
    assert len(asked) == len({str(prompt) for _, prompt in asked}) == 12
    assert all(0.0 <= record.sent <= record.token_times[0] for record in result.records)
    assert result.duration >= max(record.ended for record in result.records)
    assert result.loop_lag is not None


def test_a_run_that_is_stopped_returns_what_was_sent(monkeypatch) -> None:
    monkeypatch.setattr(processes, "TOKENS_PER_PROCESS", 2.0)
    monkeypatch.setattr(processes, "usable_cores", lambda: [0, 1])

    async def main() -> Any:
        stop = asyncio.Event()
        async with server([], 60.0) as url:
            return await run(load(url, 8), stop=stop, on_first=lambda *_: stop.set())

    result = asyncio.run(main())
    assert result.interrupted
    assert result.records
    assert {record.outcome for record in result.records} == {"interrupted"}


def test_a_process_that_ends_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(processes, "_LoadPart", lambda *_: 7)
    told: Any = {"on_change": print, "on_record": print, "on_first": print}
    split = processes.LoadProcesses("http://127.0.0.1:1", {}, 1.0, [], 1, **told)
    with pytest.raises(OSError, match="has ended with 1"):
        asyncio.run(split.run(asyncio.Event()))


@pytest.mark.parametrize(
    ("tokens", "arrival", "most", "count"),
    [(2000, 0.0, None, 1), (2001, 0.0, None, 2), (10_000, 50.0, None, 1), (10_000, 50.0, 9, 1)],
)
def test_there_are_as_many_processes_as_tokens_need(
    tokens: int, arrival: float, most: int | None, count: int, monkeypatch
) -> None:
    """Ten requests within 10 s, or 50; never more than the machine has cores."""
    monkeypatch.setattr(processes, "usable_cores", lambda: [0, 1, 2])
    jobs = [Job(i, arrival, 1, tokens, b"") for i in range(10)]
    assert processes.processes_for(jobs, most) == count
    assert processes.processes_for(jobs * 100, most) == (1 if most else 3)


def test_records_survive_the_way() -> None:
    record = Record(
        index=1, asked_prompt=2, asked_output=3, scheduled=0.0, waited=0.0, sent=0.1, ended=0.5,
        outcome="ok", token_times=(0.2, 0.3), chunk_tokens=(1, 2), text="ä",
    )  # fmt: skip
    message = processes._decode(processes._encode(processes._Ended(record)))
    assert message == processes._Ended(record)
