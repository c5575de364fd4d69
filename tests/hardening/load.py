"""Clients as a busy server meets them: some leave, some ask for too much, all arrive at once."""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

ANSWER_SECONDS = 120.0
"""A request that is not over by then is hung: queues of these tests are far shorter."""
CAPACITY_SECONDS = 5.0
"""Between two measurements of the capacity."""
TOO_LONG_SHARE = 0.1
LEAVING_SHARE = 0.2
ORDERLY_SHARE = (1 - TOO_LONG_SHARE) * (1 - LEAVING_SHARE)
GONE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)


@dataclass(frozen=True)
class Ask:
    """One request of the load."""

    path: str
    body: dict[str, Any]
    too_long: bool = False
    patience: float | None = None
    """Seconds after which the client hangs up, whatever it has."""


@dataclass
class Tally:
    """What clients saw."""

    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """Requests by what became of them."""
    faults: list[str] = field(default_factory=list)
    """What a server must never do."""
    errors: list[str] = field(default_factory=list)
    """Messages of the error events that ended streams."""


def make_ask(chance: random.Random, context: int, *, orderly: bool = False) -> Ask:
    """Draw a request; `orderly` ones are neither too long nor given up."""
    long_tail = min(int(chance.lognormvariate(4.0, 0.8)), context // 3)
    words = " ".join(
        chance.choice(("lane", "page", "token", "slice")) for _ in range(long_tail // 5)
    )
    body: dict[str, Any] = {
        "max_tokens": chance.randrange(1, max(2, context // 10)),
        "temperature": chance.choice((0, 0.7, 1)),
        "stream": chance.random() < 0.6,
        "ignore_eos": True,
    }
    too_long = not orderly and chance.random() < TOO_LONG_SHARE
    if too_long:
        words += " too much" * context
    if chance.random() < 0.4:
        path, asked = "/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}
    else:
        path, asked = "/v1/completions", {"prompt": f"{chance.choice('ABCD')} {words}"}
    leaves = not orderly and chance.random() < LEAVING_SHARE
    return Ask(path, body | asked, too_long, chance.expovariate(2.0) if leaves else None)


class Clients:
    """Sends requests and tells what became of them.

    Args:
        base: of the server's URLs.
        context: the served model's.
        seed: of what is asked.
    """

    def __init__(self, base: str, context: int, seed: int) -> None:
        self.tally = Tally()
        self._base = base
        self._context = context
        self._chance = random.Random(seed)
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Clients"]:
        """Open the connections' pool."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield self

    async def measure_capacity(self, together: int = 32) -> float:
        """Return the requests per second that are answered when some always wait."""
        end = time.monotonic() + CAPACITY_SECONDS
        done = 0

        async def one_after_another() -> None:
            nonlocal done
            while time.monotonic() < end:
                outcome = await self.send(make_ask(self._chance, self._context, orderly=True))
                done += outcome == "finished" and time.monotonic() < end

        await asyncio.gather(*(one_after_another() for _ in range(together)))
        return max(0.5, done / CAPACITY_SECONDS)

    async def overload(self, capacity: float, over: Callable[[], bool]) -> None:
        """Send twice the capacity, Poisson, until `over`; return when all have ended.

        Requests that are too long or given up come on top.

        The capacity, in requests per second, is measured again and again: the machine may be
        shared, and what was twice its capacity may be half of it a minute later.
        """
        async with asyncio.TaskGroup() as group:
            at = since = time.monotonic()
            finished = self.tally.ends["finished"]
            while not over():
                group.create_task(self.send(make_ask(self._chance, self._context)))
                at += self._chance.expovariate(2 * capacity / ORDERLY_SHARE)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                if (seconds := time.monotonic() - since) > CAPACITY_SECONDS:
                    capacity = max(0.5, (self.tally.ends["finished"] - finished) / seconds)
                    since, finished = time.monotonic(), self.tally.ends["finished"]

    async def send(self, ask: Ask) -> str:
        """Send one request; return what became of it."""
        self.tally.sent += 1
        try:
            async with asyncio.timeout(ask.patience):
                outcome = await self._answer(ask)
        except TimeoutError:
            outcome = "left"
            if ask.patience is None:
                self.tally.faults.append(f"no end in {ANSWER_SECONDS:g} s: {ask}")
        except GONE as error:
            outcome = f"connection lost: {type(error).__name__}"
        self.tally.ends[outcome] += 1
        return outcome

    async def _answer(self, ask: Ask) -> str:
        async with self._session.post(self._base + ask.path, json=ask.body) as response:
            if response.status != 200:
                return self._refused(ask, response, json.loads(await response.read())["error"])
            if ask.too_long:
                self.tally.faults.append(f"an over-long prompt was served: {ask}")
            if not ask.body["stream"]:
                answer = json.loads(await response.read())
                self._check_tokens(ask, answer["usage"]["completion_tokens"])
                return "finished"
            return await self._stream(response)

    def _refused(self, ask: Ask, response: aiohttp.ClientResponse, error: dict[str, Any]) -> str:
        match response.status, error["code"]:
            case 400, "context_length_exceeded" if ask.too_long:
                return "too long"
            case 429, "queue_full":
                if not 1 <= int(response.headers["Retry-After"]) <= 60:
                    self.tally.faults.append(f"Retry-After {response.headers['Retry-After']}")
                return "queue full"
            case 503, "unavailable":
                return "unavailable"
        self.tally.faults.append(f"status {response.status} {error} for {str(ask)[:300]}")
        return "fault"

    async def _stream(self, response: aiohttp.ClientResponse) -> str:
        last = b""
        with suppress(*GONE):
            async for line in response.content:
                last = line.strip() or last
        if last == b"data: [DONE]":
            return "finished"
        event = json.loads(last.removeprefix(b"data: ") or b"{}")
        if "error" in event:
            self.tally.errors.append(event["error"]["message"])
            return "error event"
        return "broken stream"

    def _check_tokens(self, ask: Ask, tokens: int) -> None:
        if tokens != ask.body["max_tokens"]:
            self.tally.faults.append(f"{tokens} tokens for {ask}")


async def main(base: str, context: int, capacity: float) -> None:
    """Overload a server until killed."""
    async with Clients(base, context, seed=0).connected() as clients:
        await clients.overload(capacity, lambda: False)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
