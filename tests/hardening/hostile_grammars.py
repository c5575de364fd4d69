"""What other streams feel while clients send grammars that are made to take long.

    python -m tests.hardening.hostile_grammars [BASE MODEL] [--streams 16] [--out FILE]

It asks a running server, or one of a tiny model that it starts on the CPU, and prints the gaps
between the tokens of some streams in turn: alone, while as many harmless requests are sent, and
while each hostile one is sent. All ratios are of one run.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import openai

from twolane.results.provenance import provenance, save

from ..frontend.test_structured import chain, nested
from ..server.parrot import TEMPLATE, write_parrot
from ..server.serving import serving

TOOL = {"name": "f", "parameters": {"properties": {f"p{i}": nested(10) for i in range(300)}}}
NUMBERS = {f"p{i}": {"type": "number"} for i in range(3_000)}
MANY = [{"properties": {f"a{i}": {"const": i}}} for i in range(600)]
HOSTILE = (
    {"json": {"properties": NUMBERS}},
    {"json": {"anyOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(2_000)]}},
    {"json": {"enum": [f"v{i}" for i in range(30_000)]}},
    {"json": chain(3_000)},
    {"regex": "|".join(f"w{i}x*" for i in range(10_000))},
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"grammar": 'start: start start | "a" | '},
    {"json": {"items": {"properties": dict([*NUMBERS.items()][:400])}, "minItems": 9}},
    {"json": {"properties": {"k": {"anyOf": MANY}}, "required": ["k"]}},  # slow in the middle
    {"grammar": "start: s\ns: s s | /./"},  # slower with each token
)
HARMLESS = tuple({"regex": f"[a-z]{{{1 + i}}}"} for i in range(len(HOSTILE)))


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


def send_all(client, model, outcomes, ended, grammars=HOSTILE, tool=TOOL):
    """Send a request with each grammar and one with the tool, one after the other; note how each
    ended."""
    asked = {"model": model, "prompt": "a", "max_tokens": 8}
    ask = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    tools = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    try:
        for each in grammars:
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


def send(base, model, kind):
    """Send each request of a kind; return their statuses."""
    if kind == "alone":
        return []
    outcomes, hostile = [], kind == "hostile"
    given = (HOSTILE, TOOL) if hostile else (HARMLESS, {"name": "f", "parameters": {}})
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        send_all(client, model, outcomes, threading.Event(), *given)
    return outcomes


def measure(client, model, streams, rounds):
    """The gaps of some streams alone, beside harmless requests and beside hostile ones: the medians
    of all rounds, and their ratios to those alone and beside harmless ones.

    Another process sends, since writing these requests takes long, too.
    """
    outcomes, runs = [], {"alone": [], "harmless": [], "hostile": []}
    spawn, base = multiprocessing.get_context("spawn"), str(client.base_url)
    with (
        ThreadPoolExecutor(streams) as threads,
        ProcessPoolExecutor(1, spawn, os.nice, (10,)) as sender,
    ):
        for _ in range(1 + rounds):  # the first one warms up
            for kind, found in runs.items():
                ended = threading.Event()
                asked = client, model, ended, 1000
                running = [threads.submit(gaps_until, *asked) for _ in range(streams)]
                sent = sender.submit(send, base, model, kind)
                sent.add_done_callback(lambda _, ended=ended: ended.set())
                found.append(figures([gap for each in running for gap in each.result()]))
                outcomes += sent.result()
    found = {name: middle(each[1:]) for name, each in runs.items()}
    hostile = found["hostile"]
    for other in ("alone", "harmless"):
        hostile |= {f"{key}_over_{other}": hostile[key] / found[other][key] for key in found[other]}
    return {**found, "rounds": runs, "statuses": outcomes}


def middle(rounds):
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


@contextmanager
def served(given):
    """The base of the server's URL, and its model's name."""
    if given.server:
        yield given.server
        return
    with tempfile.TemporaryDirectory() as folder:
        made = str(write_parrot(Path(folder) / "model", (), TEMPLATE))
        with serving(made, "--served-model-name", "parrot", "--kv-tokens", "40000") as server:
            yield server.base, "parrot"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", nargs="*", help="the base of its URL, and the model's name")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with (
        served(given) as (base, model),
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):
        found = measure(client, model, given.streams, given.rounds)
    print({name: each for name, each in found.items() if name != "rounds"})
    if given.out is not None:
        workload = {"model": model, "streams": given.streams, "rounds": given.rounds}
        save(given.out, provenance(workload), found)


if __name__ == "__main__":
    main()
