"""What the requests of one tenant cost another one, on a real server.

    python -m tests.hardening.tenants shares [SYSTEM ...]
    python -m tests.hardening.tenants fields

`shares` compares the first token of key B beside 300 requests of key A with that beside one.
`fields` compares the tokens of a stream beside a request whose field has as many values as it may
have with those beside the same request without the field. Both print the figures as JSON lines.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..server.serving import PATIENCE, Served, serving, wait_for, write_tiny_model
from .checkpoint import add_text
from .overload import MODEL, SERVER_CORES, seconds_of

PATH = "/v1/completions"
KEYS = ("key-a", "key-b")
PROMPT = 900
FLOOD = 300
ROUNDS = 5
CASES = {
    "arriving": (8, "--kv-tokens", "400000", "--max-running", "400"),
    "queue": (8, "--kv-tokens", "400000", "--max-running", "400"),
    "slots": (150, "--kv-tokens", "400000", "--max-running", "8"),
    "pages": (150, "--kv-tokens", "8960", "--max-running", "400"),
}
"""Tokens of an answer of key A, and what there is for all. In `arriving`, the server has not read
most requests of key A yet when that of key B comes."""
SYSTEMS = ("static-split", "auto")
VOCAB = 151_936
BYTES = list(range(3, 120))
"""Token ids of single bytes."""
PAIRS = [first + "e" for first in map(chr, range(33, 127))]
FIELDS: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "stop_token_ids": ({}, list(range(1000, 1128))),
    "logit_bias": ({}, {str(token): -1 for token in range(1000, 2024)}),
    "allowed_token_ids": ({}, list(range(VOCAB))),
    # Nearly each byte of the output begins one of them.
    "bad_words": ({"allowed_token_ids": BYTES}, PAIRS),
}
"""By field: the other fields of both requests, and its value."""


class Tenants:
    """The two keys of a server."""

    def __init__(self, served: Served) -> None:
        self._served, self._address = served, urllib.parse.urlsplit(served.base)
        self._chance = random.Random(0)
        self._sent = self._begun = 0
        """Requests of key A that are sent, and those that have a first token."""

    async def first_token(self, key: str, output: int) -> float:
        """Send a request of a key with a prompt that no other has; return the seconds to its first
        token once it has ended."""
        prompt = self._chance.choices(range(3, 1000), k=PROMPT)
        fields = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
        body, at = json.dumps(fields).encode(), time.monotonic()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        self._sent += key == KEYS[0]
        assert b" 200 " in await reader.readuntil(b"\r\n")
        await reader.readuntil(b"data: {")
        seconds = time.monotonic() - at
        self._begun += key == KEYS[0]
        try:
            await reader.read()
        finally:
            writer.close()
        return seconds

    async def beside(self, count: int, case: str) -> float:
        """Return the seconds to a first token of key B beside so many requests of key A."""
        self._sent = self._begun = 0
        output, *_ = CASES[case]
        flood = [asyncio.create_task(self.first_token(KEYS[0], output)) for _ in range(count)]
        while self._sent < count:
            await asyncio.sleep(0.001)
        if case == "queue":
            while await asyncio.to_thread(self._queued) < 0.8 * count:
                assert not all(each.done() for each in flood)
        elif case != "arriving":
            while self._begun < min(count, 8):
                await asyncio.sleep(0.001)
        seconds = await self.first_token(KEYS[1], 2)
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        return seconds

    def _queued(self) -> float:
        figures = self._served.metrics()
        return figures["num_requests_waiting"] + figures["num_requests_running"]


@contextmanager
def served_apart(*arguments: str) -> Iterator[Served]:
    """Run a server on the first cores that there are, and its clients on the others, if any."""
    allowed = sorted(os.sched_getaffinity(0))
    own, others = allowed[:SERVER_CORES], allowed[SERVER_CORES:]
    os.sched_setaffinity(0, own)
    try:
        with serving(*arguments) as served:
            os.sched_setaffinity(0, others or own)
            yield served
    finally:
        os.sched_setaffinity(0, allowed)


def shares(system: str, case: str) -> dict[str, Any]:
    """Return the seconds to a first token of key B beside one request of key A and beside 300, and
    the ratio of their medians."""
    _, *room = CASES[case]
    with tempfile.TemporaryDirectory() as name:
        model = write_tiny_model(Path(name) / "model", **MODEL)
        keys = [word for key in KEYS for word in ("--api-key", key)]
        arguments = ("--load-format", "dummy", "--system", system, "--max-queue", "1000")
        with served_apart(str(model), *arguments, *map(str, room), *keys) as served:
            tenants, found = Tenants(served), dict[int, list[float]]()
            for _ in range(4):
                asyncio.run(tenants.first_token(KEYS[1], 4))
            for count in (1, FLOOD) * ROUNDS:
                wait_for(lambda: not served.metrics()["requests_in_flight"])
                found.setdefault(count, []).append(asyncio.run(tenants.beside(count, case)))
    ratio = median(found[FLOOD]) / median(found[1])
    told = {str(count): [round(each, 3) for each in sorted(found[count])] for count in found}
    return {"system": system, "case": case, "seconds": told, "ratio": round(ratio, 2)}


def gaps(served: Served, body: Mapping[str, Any], seconds: float) -> tuple[float, float]:
    """Return the median seconds between two tokens of a stream beside a request, and the CPU
    seconds of the engine for each token of the stream."""
    address = urllib.parse.urlsplit(served.base).netloc

    def post(fields: Mapping[str, Any]) -> HTTPConnection:
        connection = HTTPConnection(address, timeout=PATIENCE)
        connection.request("POST", PATH, json.dumps(fields), {"Content-Type": "application/json"})
        return connection

    times, stop = list[float](), threading.Event()

    def stream() -> None:
        fields = {"prompt": [5, 6, 7], "max_tokens": 50_000, "ignore_eos": True, "stream": True}
        connection = post(fields)
        for line in connection.getresponse():
            if line.startswith(b"data"):
                times.append(time.monotonic())
            if stop.is_set():
                break
        connection.close()

    reader = threading.Thread(target=stream)
    reader.start()
    beside = post(body)
    wait_for(lambda: served.metrics()["num_requests_running"] > body["n"])
    first, before = len(times), seconds_of(served.engine_pid)
    time.sleep(seconds)
    spent, found = seconds_of(served.engine_pid) - before, times[first:]
    beside.close()
    stop.set()
    reader.join()
    wait_for(lambda: not served.metrics()["requests_in_flight"])
    assert len(found) > 2, "the request beside the stream was refused, or has held it up"
    between = [later - earlier for earlier, later in pairwise(found)]
    return median(between), spent / len(found)


def fields(names: Sequence[str] = tuple(FIELDS), seconds: float = 3.0) -> list[dict[str, Any]]:
    """Return, for each field, how much longer a token of a stream takes beside a request with it
    than beside the request without it: in time, and in CPU time of the engine."""
    with tempfile.TemporaryDirectory() as name:
        model = add_text(write_tiny_model(Path(name) / "model", vocab_size=VOCAB))
        rows = []
        with serving(str(model), "--load-format", "dummy", "--kv-tokens", "150000") as served:
            for field in names:
                more, value = FIELDS[field]
                base = {"prompt": [5, 6, 7], "max_tokens": 4000, "min_tokens": 4000, "n": 16}
                bodies = ({**base, **more}, {**base, **more, field: value})
                seen = [[gaps(served, body, seconds) for body in bodies] for _ in range(ROUNDS)]
                time_ratio, cpu_ratio = (
                    median(each[1][i] / each[0][i] for each in seen) for i in (0, 1)
                )
                row = {"field": field, "time": round(time_ratio, 3), "cpu": round(cpu_ratio, 3)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    what, *names = sys.argv[1:]
    if what == "fields":
        fields(names or tuple(FIELDS))
        return
    for system in names or SYSTEMS:
        for case in CASES:
            print(json.dumps(shares(system, case)), flush=True)


if __name__ == "__main__":
    main()
