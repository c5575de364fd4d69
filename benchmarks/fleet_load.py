"""Drive a running fleet and count every outcome: `python benchmarks/fleet_load.py URL [...]`.

Requests stream, in conversations that share one of a few long instructions. An answer is *whole*
with its `[DONE]`, *failed* with an error status or an error event, and *lost* if it began and ended
with neither. Kill, stop or restart servers meanwhile.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from twolane.results.provenance import provenance, save


async def ask(session: aiohttp.ClientSession, url: str, body: dict) -> dict:
    """Send one request; return its outcome, with its first token and replica."""
    begun, first, done, error, replica = time.perf_counter(), None, False, None, None
    cached = asked = 0
    try:
        async with session.post(url + "/v1/completions", json=body) as answer:
            replica = answer.headers.get("x-replica")
            if answer.status != 200:
                error = f"status {answer.status}"
            async for line in answer.content:
                if answer.status != 200 or not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    error = event["error"]["code"]
                elif event.get("usage"):
                    asked = event["usage"]["prompt_tokens"]
                    cached = (event["usage"].get("prompt_tokens_details") or {}).get(
                        "cached_tokens", 0
                    )
                first = first or time.perf_counter()
    except TimeoutError:
        error = "the client's timeout"
    except aiohttp.ClientError as problem:
        error = None if first else type(problem).__name__
    outcome = "whole" if done and not error else "failed" if error else "lost"
    return {
        "outcome": outcome,
        "error": error,
        "replica": replica,
        "ttft": first and first - begun,
        "e2e": time.perf_counter() - begun,
        "at": begun,
        "prompt": asked,
        "cached": cached,
    }


def bodies(count: int, groups: int, shared: int, own: int, output: int, seed: int) -> list[dict]:
    """Requests with prompts of token ids; each begins with one of a few shared parts."""
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


async def drive(options: argparse.Namespace) -> list[dict]:
    """Send everything at its time; the rate of each third may differ."""
    draw, tasks, ended = random.Random(options.seed), [], Counter()
    sent = bodies(
        options.requests,
        options.groups,
        options.shared,
        options.own,
        options.output,
        options.seed,
    )
    begun = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=options.timeout)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for i, body in enumerate(sent):
            tasks.append(asyncio.create_task(ask(session, options.url, body)))
            rate = options.rates[i * len(options.rates) // len(sent)]
            await asyncio.sleep(draw.expovariate(rate))
            if options.show and i % 10 == 0:
                async with session.get(options.url + "/fleet") as answer:
                    states = [each["phase"] for each in (await answer.json())["replicas"]]
                print(f"{time.perf_counter() - begun:6.1f} s: {Counter(states)}", flush=True)
        results = await asyncio.gather(*tasks)
    for each in results:
        each["at"] -= begun
        ended[each["outcome"]] += 1
    return results


def figures(results: list[dict]) -> dict:
    """What came of all."""
    ttfts = [each["ttft"] for each in results if each["ttft"] is not None]
    prompt = sum(each["prompt"] for each in results)
    return {
        "outcomes": Counter(each["outcome"] for each in results),
        "errors": Counter(str(each["error"]) for each in results if each["error"]),
        "replicas": Counter(str(each["replica"]) for each in results),
        "ttft_p50": float(np.percentile(ttfts, 50)) if ttfts else None,
        "ttft_p95": float(np.percentile(ttfts, 95)) if ttfts else None,
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
    parser.add_argument("--show", action="store_true", help="print the fleet's phases meanwhile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = figures(asyncio.run(drive(options)))
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    if options.out:
        about = provenance({k: v for k, v in vars(options).items() if k not in ("out", "show")})
        save(options.out, about, found)


if __name__ == "__main__":
    main()
