"""What a flood does to others, and whether Retry-After is true: a table.

`python -m tests.hardening.queueing` floods servers over HTTP: at equal and at the best priority,
and with more requests than may wait, before and after single requests were served; and it asks for
one prompt with several salts.
"""

import json
import random
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..server.serving import Served, serving, wait_for, write_tiny_model

CLIENTS = 64
PROMPT_TOKENS = 700
FLOOD_SECONDS = 30.0
"""A flood that is not interrupted lasts this many seconds."""
SETTLED_SECONDS = 2.0
BEST_PRIORITY = -(2**31) + 1
MAX_QUEUE, BURST = 64, 192
"""Requests that may wait, and requests that are sent at once."""
ARGUMENTS = ("--load-format", "dummy", "--kv-tokens", "60000")
PATH = "/v1/completions"


class Sent(NamedTuple):
    """What came of a streamed request; times are monotonic seconds."""

    status: int
    at: float
    """When its answer began: for those that are served, when the first token came."""
    retry_after: int
    """What a refusal says, in seconds; 0: there was none."""


def prompt(chance: random.Random) -> list[int]:
    """Return a prompt that no other one begins like."""
    return [5 + chance.randrange(100) for _ in range(PROMPT_TOKENS)]


def send(served: Served, **fields: Any) -> Sent:
    """Send a request that streams, and read it to its end."""
    body = json.dumps({"max_tokens": 4, "ignore_eos": True, "stream": True, **fields}).encode()
    request = urllib.request.Request(served.base + PATH, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            response.readline()
            at = time.monotonic()
            response.read()
            return Sent(response.status, at, 0)
    except urllib.error.HTTPError as error:
        error.read()
        return Sent(error.code, time.monotonic(), int(error.headers.get("Retry-After", 0)))


@contextmanager
def flood(served: Served, **fields: Any) -> Iterator[Callable[[], bool]]:
    """Have clients send one prompt after the other; yield whether they still do."""
    end, over = time.monotonic() + FLOOD_SECONDS, threading.Event()

    def client(number: int) -> None:
        chance = random.Random(number)
        while not over.is_set() and time.monotonic() < end:
            send(served, prompt=prompt(chance), **fields)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: served.metrics()["num_requests_waiting"] > CLIENTS // 2)
        time.sleep(SETTLED_SECONDS)
        yield lambda: time.monotonic() < end
    finally:
        over.set()
        for thread in threads:
            thread.join()


def waited(served: Served, priority: int) -> tuple[float, bool]:
    """Seconds that an ordinary request waits beside a flood, and whether the flood outlasts it."""
    with flood(served, **({"priority": priority} if priority else {})) as lasts:
        began = time.monotonic()
        sent = send(served, prompt=[9, 8, 7])
        assert sent.status == 200
        return sent.at - began, lasts()


def burst(served: Served, seed: int) -> tuple[list[Sent], float]:
    """Send more requests at once than may wait; return all, and when the first one was sent."""
    chance = random.Random(seed)
    prompts, began = [prompt(chance) for _ in range(BURST)], time.monotonic()
    with ThreadPoolExecutor(BURST) as pool:
        return list(pool.map(lambda ids: send(served, prompt=ids), prompts)), began


def told_and_true(served: Served, seed: int) -> str:
    """Compare what refusals say with when the queue that they met had been served."""
    sent, began = burst(served, seed)
    refused = [each for each in sent if each.status == 429]
    first = min((each for each in sent if each.status == 200), key=lambda each: each.at)
    # All are sent at once: a refusal meets the queue whose last request is served last.
    last = max(each.at for each in sent if each.status == 200)
    told = sorted(each.retry_after for each in refused)
    true = sorted(last - each.at for each in refused)
    return (
        f"{len(sent) - len(refused)} served, {len(refused)} refused; told {told[0]} to {told[-1]}, "
        f"median {told[len(told) // 2]} s; all were served {true[0]:.1f} to {true[-1]:.1f} s "
        f"later, median {true[len(true) // 2]:.1f} s (first token after {first.at - began:.1f} s)"
    )


def salted(served: Served) -> str:
    """Tokens that the prefix cache finds for the same and for another salt, over HTTP."""
    ids = prompt(random.Random(3))

    def cached(salt: str | None) -> int:
        body = {"prompt": ids, "max_tokens": 1, **({"cache_salt": salt} if salt else {})}
        status, _, answer = served.request(PATH, body)
        assert status == 200
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    first = cached("one")
    return f"first {first}, same salt {cached('one')}, another {cached('two')}, none {cached(None)}"


def main() -> None:
    """Print what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(Path(folder) / "model"))
        with serving(model, *ARGUMENTS) as served:
            body = {"prompt": [5], "priority": BEST_PRIORITY}
            print("priority without --allow-priority:", served.request(PATH, body)[0], flush=True)
            print("cached tokens by cache_salt:", salted(served), flush=True)
        with serving(model, *ARGUMENTS, "--allow-priority", "--max-queue", "256") as served:
            for priority in (0, BEST_PRIORITY):
                seconds, outlasted = waited(served, priority)
                flooded = f"{CLIENTS} clients at priority {priority}"
                print(f"{flooded}: another waited {seconds:.1f} s, flood lasts: {outlasted}")
        with serving(model, *ARGUMENTS, "--max-queue", str(MAX_QUEUE)) as served:
            print("Retry-After, server without history:", told_and_true(served, 7), flush=True)
            for number in range(20):
                assert send(served, prompt=[7 + number]).status == 200
                time.sleep(0.2)
            print("Retry-After, after single requests:", told_and_true(served, 8), flush=True)


if __name__ == "__main__":
    sys.exit(main())
