"""Drive a running fleet and count every outcome: `python benchmarks/fleet_load.py URL [...]`.

Requests stream, in conversations that share one of a few long instructions. An answer is *whole*
with its `[DONE]`, *failed* with an error status or an error event, *timed out* if the client gave
up, and *lost* if it ended with none of these. `--kill`, `--stop` and `--restart` do that to servers
of this machine meanwhile; what the fleet makes of it is recorded once a second.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from measured import cpu_seconds

from twolane.results.provenance import provenance, save


async def ask(session: aiohttp.ClientSession, url: str, body: dict) -> dict:
    """Send one request; return its outcome, with its first token and replica."""
    begun, first, done, error, replica = time.perf_counter(), None, False, None, None
    cached, asked, late, predicted, events = 0, 0, False, 0.0, 0
    try:
        async with session.post(url + "/v1/completions", json=body) as answer:
            replica = answer.headers.get("x-replica")
            predicted = float(answer.headers.get("x-predicted-ttft-ms", 0)) / 1e3
            if answer.status != 200:
                error = f"status {answer.status}"
            async for line in answer.content:
                if answer.status != 200 or not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event, events = msgspec.json.decode(line[6:]), events + 1
                if "error" in event:
                    error = event["error"]["code"]
                elif event.get("usage"):
                    asked = event["usage"]["prompt_tokens"]
                    cached = (event["usage"].get("prompt_tokens_details") or {}).get(
                        "cached_tokens", 0
                    )
                first = first or time.perf_counter()
    except TimeoutError:
        late = True
    except aiohttp.ClientError as problem:
        error = None if first else type(problem).__name__
    outcome = "timed out" if late else "failed" if error else "whole" if done else "lost"
    return {
        "outcome": outcome,
        "error": error,
        "replica": replica,
        "events": events,
        "ttft": first and first - begun,
        "predicted": predicted,
        "e2e": time.perf_counter() - begun,
        "at": begun,
        "prompt": asked,
        "cached": cached,
    }


def bodies(count: int, groups: int, shared: int, own: int, output: int, seed: int) -> list[dict]:
    """Return requests with prompts of token ids, each beginning with one of a few shared
    prefixes."""
    draw = random.Random(seed)
    parts = [[draw.randrange(1000, 30_000) for _ in range(shared)] for _ in range(groups)]
    return [
        {
            "prompt": draw.choice(parts) + [draw.randrange(1000, 30_000) for _ in range(own)],
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


async def members(session: aiohttp.ClientSession, url: str) -> list[dict]:
    """Return the fleet's description of its servers."""
    async with session.get(url + "/fleet", timeout=aiohttp.ClientTimeout(total=10)) as answer:
        return (await answer.json())["replicas"]


async def hurt(session: aiohttp.ClientSession, options: argparse.Namespace) -> list[dict]:
    """Kill one server and stop another for a while, each at its time; return the events."""
    begun, done = time.perf_counter(), []
    faults = [(options.kill, "kill"), (options.stop and options.stop[0], "stop")]
    for at, kind in sorted((at, kind) for at, kind in faults if at is not None):
        await asyncio.sleep(begun + at - time.perf_counter())
        serving = [each for each in await members(session, options.url) if each["pid"]]
        busiest = max(serving, key=lambda each: (each["phase"] == "serving", each["open"]))
        done.append({"at": at, "what": kind, "name": busiest["name"], "open": busiest["open"]})
        if kind == "kill":
            os.kill(busiest["pid"], signal.SIGKILL)
            continue
        os.killpg(busiest["pid"], signal.SIGSTOP)
        await asyncio.sleep(options.stop[1])
        try:
            os.killpg(busiest["pid"], signal.SIGCONT)
        except ProcessLookupError:
            done[-1]["gone"] = True
    if options.restart is not None:
        await asyncio.sleep(begun + options.restart - time.perf_counter())
        os.kill(options.fleet_pid, signal.SIGHUP)
        done.append({"at": options.restart, "what": "restart"})
    return done


async def watch(session: aiohttp.ClientSession, url: str, seen: list[dict]) -> None:
    """Record changes of the servers' phases, checked once a second."""
    begun = time.perf_counter()
    while True:
        now = {each["name"]: each["phase"] for each in await members(session, url)}
        if not seen or seen[-1]["servers"] != now:
            seen.append({"at": round(time.perf_counter() - begun, 1), "servers": now})
            print(seen[-1], flush=True)
        await asyncio.sleep(1.0)


async def drive(options: argparse.Namespace) -> tuple[list[dict], dict]:
    """Send all requests at their times; the rate of each part may differ."""
    draw, tasks, seen = random.Random(options.seed), [], []
    shape = options.groups, options.shared, options.own, options.output, options.seed
    sent = bodies(options.requests, *shape)
    begun = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=options.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        watching = asyncio.create_task(watch(session, options.url, seen))
        hurting = asyncio.create_task(hurt(session, options))
        for i, body in enumerate(sent):
            tasks.append(asyncio.create_task(ask(session, options.url, body)))
            rate = options.rates[i * len(options.rates) // len(sent)]
            await asyncio.sleep(draw.expovariate(rate))
        results = await asyncio.gather(*tasks)
        faults = await hurting
        await asyncio.sleep(options.after)
        watching.cancel()
    for each in results:
        each["at"] -= begun
    return results, {"faults": faults, "servers": seen}


def figures(results: list[dict]) -> dict:
    """Return the figures of all requests."""
    ttfts = [each["ttft"] for each in results if each["ttft"] is not None]
    prompt = sum(each["prompt"] for each in results)
    return {
        "outcomes": Counter(each["outcome"] for each in results),
        "errors": Counter(str(each["error"]) for each in results if each["error"]),
        "replicas": Counter(str(each["replica"]) for each in results),
        "ttft_p50": float(np.percentile(ttfts, 50)) if ttfts else None,
        "ttft_p95": float(np.percentile(ttfts, 95)) if ttfts else None,
        "events": sum(each["events"] for each in results),
        "predicted_p50": float(np.median([each["predicted"] for each in results])),
        "hit_rate": sum(each["cached"] for each in results) / prompt if prompt else None,
        "seconds": max(each["at"] + each["e2e"] for each in results),
    }


def main() -> None:
    """Drive, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="one for each part")
    parser.add_argument("--groups", type=int, default=4, help="shared instructions")
    parser.add_argument("--shared", type=int, default=512, help="tokens of each")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt alone")
    parser.add_argument("--output", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", type=float, help="seconds until the busiest server is killed")
    parser.add_argument("--stop", type=float, nargs=2, help="seconds until one stops, and for how")
    parser.add_argument("--restart", type=float, help="seconds until --fleet-pid gets a SIGHUP")
    parser.add_argument("--fleet-pid", type=int, help="process whose CPU time is recorded")
    parser.add_argument("--after", type=float, default=0.0, help="seconds to watch after the load")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = provenance({k: v for k, v in vars(options).items() if k not in ("out", "fleet_pid")})
    before = options.fleet_pid and cpu_seconds(options.fleet_pid)
    results, happened = asyncio.run(drive(options))
    found = figures(results) | happened
    if before is not None:
        found["fleet_cpu_seconds"] = cpu_seconds(options.fleet_pid) - before
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    if options.out:
        save(options.out, about, found)


if __name__ == "__main__":
    main()
