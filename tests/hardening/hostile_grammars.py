"""What other streams feel while clients send grammars that are made to take long.

    python -m tests.hardening.hostile_grammars BASE MODEL [--streams 16] [--out FILE]

It asks a running server, and prints the gaps between the tokens of some streams: alone, and while
each hostile request is sent.
"""

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import openai

from twolane.results.provenance import provenance, save

from ..frontend.test_structured import chain, nested

TOOL = {"name": "f", "parameters": {"properties": {f"p{i}": nested(10) for i in range(300)}}}
HOSTILE = (
    {"json": {"properties": {f"p{i}": {"type": "number"} for i in range(3_000)}}},
    {"json": {"anyOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(2_000)]}},
    {"json": {"enum": [f"v{i}" for i in range(30_000)]}},
    {"json": chain(3_000)},
    {"regex": "|".join(f"w{i}x*" for i in range(10_000))},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"grammar": 'start: start start | "a" | '},
)


def gaps_until(client, model, ended, at_least=300):
    """Stream tokens until something has ended; return the gaps between them."""
    asked = {"model": model, "prompt": "a", "max_tokens": 30_000}
    stream = client.completions.create(stream=True, extra_body={"ignore_eos": True}, **asked)
    with stream:
        times = []
        for _ in stream:
            times.append(time.monotonic())
            if ended.is_set() and len(times) > at_least:
                break
    return [after - before for before, after in pairwise(times)]


def felt(gaps):
    """The mean gap that a moment falls into."""
    return sum(gap * gap for gap in gaps) / sum(gaps)


def send_all(client, model, outcomes, ended):
    """Send each hostile request, one after the other; note how it ended."""
    asked = {"model": model, "prompt": "a", "max_tokens": 2}
    ask = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    tools = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
    try:
        for each in HOSTILE:
            body = {"structured_outputs": each}
            outcomes.append(status(lambda b=body: client.completions.create(extra_body=b, **asked)))
        outcomes.append(status(lambda: client.chat.completions.create(**ask, **tools)))
    finally:
        ended.set()


def status(ask):
    try:
        ask()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def figures(gaps):
    """Milliseconds: median, P99 and largest of all gaps, and what is felt."""
    each = sorted(gaps)
    names = ("median", "p99", "max", "felt")
    found = each[len(each) // 2], each[int(0.99 * len(each))], each[-1], felt(gaps)
    return {f"{name}_ms": 1e3 * value for name, value in zip(names, found, strict=True)}


def measure(client, model, streams, rounds):
    """The gaps of some streams alone, and while hostile requests are sent."""
    ended, outcomes, found = threading.Event(), [], {}
    with ThreadPoolExecutor(streams + 1) as threads:

        def gaps():
            running = [threads.submit(gaps_until, client, model, ended) for _ in range(streams)]
            return [gap for each in running for gap in each.result()]

        ended.set()
        gaps()
        found["alone"] = figures(gaps())
        ended.clear()

        def send():
            for _ in range(rounds):
                send_all(client, model, outcomes, threading.Event())
            ended.set()

        sending = threads.submit(send)
        found["beside hostile grammars"] = figures(gaps())
        sending.result()
    found["statuses"] = outcomes
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="of the server's URL")
    parser.add_argument("model", help="as the server names it")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with openai.OpenAI(base_url=f"{given.base}/v1", api_key="none", max_retries=0) as client:
        found = measure(client, given.model, given.streams, given.rounds)
    print(found)
    if given.out is not None:
        workload = {"model": given.model, "streams": given.streams, "rounds": given.rounds}
        save(given.out, provenance(workload), found)


if __name__ == "__main__":
    main()
