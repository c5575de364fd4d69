"""`bench serve`: send a workload to a server and measure what comes back."""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import TypedDict

import msgspec

from twolane.bench import engine_gaps, preflight
from twolane.bench.client import Client, Job, LoadRun, RunCounts
from twolane.bench.energy import EnergyMeter
from twolane.bench.http import Clock
from twolane.bench.preflight import BenchError
from twolane.bench.processes import LoadProcesses, processes_for
from twolane.results.metrics import LAG_PERCENTILES, Distribution
from twolane.results.record import Record, status_outcome
from twolane.results.result import BenchConfig, Result
from twolane.workload.prompts import PromptMaker, as_text
from twolane.workload.traces import TraceRequest


class _Told(TypedDict):
    """What is told of a load in progress; see `run`."""

    on_change: Callable[[RunCounts], None]
    on_record: Callable[[Record], None]
    on_first: Callable[[int, float], None]


async def run(
    config: BenchConfig,
    *,
    stop: asyncio.Event | None = None,
    on_change: Callable[[RunCounts], None] = lambda tally: None,
    on_record: Callable[[Record], None] = lambda record: None,
    on_first: Callable[[int, float], None] = lambda index, ttft: None,
    clock: Clock = time.perf_counter,
) -> Result:
    """Send the workload to the server; return the result.

    Args:
        config: Settings of the run.
        stop: set it to end the run early; what was measured until then is returned.
        on_change: called with the counts whenever a request is sent or ends.
        on_record: called with each request's outcome.
        on_first: called with each request's index and TTFT, in seconds.
        clock: Clock of the timestamps, in seconds.

    Raises:
        FieldError: an option is wrong or contradicts another.
        TraceError: the trace file is bad.
        BenchError: see `preflight.check`; or a warm-up request fails.
    """
    config.check()
    workload = config.workload.build()
    stop = stop or asyncio.Event()
    date = datetime.now().astimezone()
    async with Client(config.url, config.request_headers, config.timeout, clock) as client:
        model = await preflight.check(config, partial(_smallest, config))
        await _warm_up(config, model, workload, client, stop)
        jobs = make_jobs(config, model, workload)
        before = await _engine_gaps(config)
        told: _Told = {"on_change": on_change, "on_record": on_record, "on_first": on_first}
        count = processes_for(jobs, config.max_concurrency) if clock is time.perf_counter else 1
        load: LoadRun | LoadProcesses
        if count > 1:
            sent = config.url, config.request_headers, config.timeout
            load = LoadProcesses(*sent, jobs, count, **told)
        else:
            load = LoadRun(client, jobs, max_concurrency=config.max_concurrency, **told)
        with EnergyMeter(config.base_url) as meter:
            await load.run(stop)
            energy = meter.energy()
        after = await _engine_gaps(config)
    return Result(
        config=config,
        model=model,
        date=date,
        workload=tuple(workload),
        records=tuple(sorted(load.records, key=lambda record: record.index)),
        duration=load.duration,
        interrupted=stop.is_set(),
        loop_lag=Distribution.of(load.lags, LAG_PERCENTILES),
        engine_gaps=engine_gaps.between(before, after),
        energy=energy,
    )


async def _engine_gaps(config: BenchConfig) -> engine_gaps.GapHistogram | None:
    """Return the server's own count of gaps so far, if it was requested."""
    if not config.engine_gaps:
        return None
    return await engine_gaps.look(config.base_url, config.request_headers)


def make_jobs(config: BenchConfig, model: str, workload: list[TraceRequest]) -> list[Job]:
    """Return the jobs of a workload, with bodies encoded in advance (≈ 6 B a token)."""
    prompts = PromptMaker(config.vocab_range, config.content_seed)
    return [
        Job(
            index=index,
            arrival=request.arrival or 0.0,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            body=_body(config, model, prompts.token_ids(index, request), request.output_tokens),
        )
        for index, request in enumerate(workload)
    ]


def _body(config: BenchConfig, model: str, ids: list[int], output_tokens: int) -> bytes:
    options = {"include_usage": True}
    if config.playout:  # which needs the number of tokens in each chunk
        options["continuous_usage_stats"] = True
    body: dict[str, object] = {
        "model": model,
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": options,
        **config.extra_body,
    }
    if config.ignore_eos:
        body["ignore_eos"] = True
    if config.chat:
        body["messages"] = [{"role": "user", "content": as_text(ids)}]
    else:
        body["prompt"] = ids if config.sends_ids else as_text(ids)
    return msgspec.json.encode(body)


def _smallest(config: BenchConfig, model: str) -> bytes:
    """Return the body of a request with one prompt token and one output token."""
    return _body(config, model, [config.vocab_range.low], 1)


async def _warm_up(
    config: BenchConfig,
    model: str,
    workload: list[TraceRequest],
    client: Client,
    stop: asyncio.Event,
) -> None:
    """Send requests like the first ones with other content, concurrently and unmeasured.

    Raises:
        BenchError: one failed, or all were refused; that a server turns away some is no error.
    """
    if not config.num_warmups:
        return
    shapes = [
        msgspec.structs.replace(workload[index % len(workload)], arrival=0.0, hash_ids=())
        for index in range(config.num_warmups)
    ]
    # Offset of the warm-ups' seed, so that their prompts are not in the prefix cache later.
    seed = config.content_seed + (1 << 32)
    jobs = make_jobs(msgspec.structs.replace(config, prompt_seed=seed), model, shapes)
    load = LoadRun(client, jobs, max_concurrency=config.max_concurrency)
    await load.run(stop)
    if stop.is_set():  # those in flight were cut short, which is no failure of the server's
        return
    served = any(record.ok for record in load.records)
    for record in load.records:
        if not (record.ok or (served and record.outcome == status_outcome(429))):
            raise BenchError(f"a warm-up request failed: {record.outcome}: {record.error}")
