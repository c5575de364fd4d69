"""Rounds of sudden deaths of a server of two ranks under streams and calls."""

import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..server.serving import PATIENCE, Served, alive, children, serving, wait_for, write_tiny_model

STREAMS, CALLS = 8, 6
STREAM_TOKENS, CALL_TOKENS = 300, 120
GONE_SECONDS = PATIENCE
"""Seconds in which everything must be over: the drain, the patience of collectives, and room."""
ARGUMENTS = ("--load-format", "dummy", "--kv-tokens", "60000", "--drain-seconds", "2")
RANKS = ("--tensor-parallel-size", "2")


class Told(NamedTuple):
    """What a client was told."""

    whole: bool
    """Whether the answer was said to be complete."""
    tokens: int
    error: bool


class Client(threading.Thread):
    """One call or stream."""

    def __init__(self, served: Served, seed: int, *, stream: bool) -> None:
        super().__init__(daemon=True)
        self.told = Told(False, 0, False)
        self._wanted = STREAM_TOKENS if stream else CALL_TOKENS
        prompt = [3 + (seed + k) % 100 for k in range(20 + seed % 50)]
        self._body = {"prompt": prompt, "max_tokens": self._wanted, "stream": stream}
        self._body |= {"ignore_eos": True, "return_token_ids": True}
        self._base = served.base
        self.start()

    @property
    def short(self) -> bool:
        """Whether an answer that was said to be complete is not."""
        return self.told.whole and self.told.tokens != self._wanted

    def run(self) -> None:
        address = urllib.parse.urlsplit(self._base)
        tokens = 0
        try:
            connection = http.client.HTTPConnection(
                address.hostname, address.port, timeout=PATIENCE
            )
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            response = connection.getresponse()
            if not self._body["stream"] or response.status != 200:
                answer = json.loads(response.read())
                if response.status == 200:
                    tokens = len(answer["choices"][0]["token_ids"])
                self.told = Told(response.status == 200, tokens, response.status != 200)
                return
            for line in response:
                if line == b"data: [DONE]\n":
                    self.told = Told(True, tokens, False)
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.told = Told(False, tokens, True)
                        return
                    tokens += len(event["choices"][0]["token_ids"])
        except (OSError, http.client.HTTPException, ValueError):
            self.told = Told(False, tokens, False)  # broken off without a word


def of_server(served: Served) -> dict[str, int]:
    """The processes of a server by role."""
    (engine,) = [pid for pid in children(served.process.pid) if "engine" in command(pid)]
    modules = ("cuda_follower", "cuda_prefill", "cpu_follower", "cpu_prefill")
    followers = sorted(
        pid for pid in children(engine) if any(module in command(pid) for module in modules)
    )
    found = {"server": served.process.pid, "engine": engine}
    return found | {f"rank {i}": pid for i, pid in enumerate(followers, start=1)}


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def everyone(pid: int) -> set[int]:
    """A process and all that it has started, and so on."""
    return {pid}.union(*(everyone(child) for child in children(pid)))


def kill(*roles: str, number: int = signal.SIGKILL) -> Callable[[dict[str, int]], None]:
    """Send a signal to these roles, one after the other."""

    def do(pids: dict[str, int]) -> None:
        for role in roles:
            with suppress(ProcessLookupError):  # one that has ended because of another
                os.kill(pids[role], number)

    return do


def stopped_meanwhile(pids: dict[str, int]) -> None:
    """The server stands still while its engine dies."""
    os.kill(pids["server"], signal.SIGSTOP)
    os.kill(pids["engine"], signal.SIGKILL)
    time.sleep(0.3)
    os.kill(pids["server"], signal.SIGCONT)


def in_the_drain(pids: dict[str, int]) -> None:
    """The engine dies while the server drains."""
    os.kill(pids["server"], signal.SIGTERM)
    time.sleep(0.3)
    with suppress(ProcessLookupError):  # all answers may have ended before
        os.kill(pids["engine"], signal.SIGKILL)


DEATHS: dict[str, tuple[Callable[[dict[str, int]], None], tuple[int, ...]]] = {
    "kill server": (kill("server"), (-9,)),
    "kill engine": (kill("engine"), (1,)),
    "kill both": (kill("server", "engine"), (-9,)),
    "kill rank 1": (kill("rank 1"), (1,)),
    "kill rank 1, then server": (kill("rank 1", "server"), (-9,)),
    "stop rank 1": (kill("rank 1", number=signal.SIGSTOP), (1,)),
    "stop engine": (kill("engine", number=signal.SIGSTOP), (1,)),
    "terminate server": (kill("server", number=signal.SIGTERM), (0,)),
    "interrupt server twice": (kill("server", "server", number=signal.SIGINT), (0,)),
    "kill engine of a stopped server": (stopped_meanwhile, (1,)),
    "kill engine in the drain": (in_the_drain, (0, 1)),
}
"""What happens to the processes, and the exit statuses of the server that are right."""


def one_round(model: Path, death: str, rng: random.Random) -> list[Told]:
    """Start a server, load it, do it to death; return what its clients were told.

    Raises:
        AssertionError: somebody outlived it, a short answer was called whole, or it hangs.
    """
    act, statuses = DEATHS[death]
    with serving(str(model), *ARGUMENTS, *RANKS, "--hang-seconds", "3") as served:
        pids, all_of_them = of_server(served), everyone(served.process.pid)
        seeds = [rng.randrange(10_000) for _ in range(STREAMS + CALLS)]
        clients = [Client(served, seed, stream=i < STREAMS) for i, seed in enumerate(seeds)]
        time.sleep(rng.uniform(0.0, 2.0))
        act(pids)
        status = served.process.wait(GONE_SECONDS)
        wait_for(lambda: not any(map(alive, all_of_them)), GONE_SECONDS)
        for client in clients:
            client.join(GONE_SECONDS)
            assert not client.is_alive(), "a client hangs"
        assert status in statuses, f"exit status {status}"
        assert not any(client.short for client in clients), [client.told for client in clients]
    return [client.told for client in clients]


def rounds(count: int, seed: int) -> Counter[str]:
    """Run rounds of all kinds in turn; how clients fared."""
    rng, seen = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder), num_key_value_heads=2)
        names = list(DEATHS)
        rng.shuffle(names)
        for i in range(count):
            told = one_round(model, names[i % len(names)], rng)
            seen["whole"] += sum(each.whole for each in told)
            seen["told of an error"] += sum(each.error for each in told)
            seen["broken off"] += sum(not each.whole and not each.error for each in told)
    return seen


if __name__ == "__main__":
    print(rounds(int(sys.argv[1]), int(sys.argv[2])))
