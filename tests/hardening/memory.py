"""A long run of mixed requests: neither process may grow once it is warm.

`python -m tests.hardening.memory REQUESTS` prints the memory of both every thousand requests.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..server.serving import serving
from .checkpoint import write_text_model
from .footprint import MIB, Footprint
from .load import Clients, make_ask
from .target import ARGUMENTS, Target

TOGETHER = 24
WARM_UP = 0.25
"""Share of the requests before memory is judged."""
LOOKS = 40
EXTRAS: tuple[dict[str, Any], ...] = (
    *({} for _ in range(6)),
    {"logprobs": 3},
    {"n": 3, "seed": 5},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {"5": 4, "9": -50}},
    {"stop": ["a", "the end"]},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"cache_salt": "somebody"},
    {"nothing": "that is known"},
    {"max_tokens": "many"},
)


class Growth(NamedTuple):
    """How much the memory of both processes changed after the warm-up, as shares."""

    server: float
    engine: float


def asks(chance: random.Random, context: int, count: int) -> Iterator[Any]:
    """Requests of all kinds; some are refused, some are given up."""
    for _ in range(count):
        ask, more = make_ask(chance, context), dict(chance.choice(EXTRAS))
        if "logprobs" in more and ask.path.endswith("chat/completions"):
            more = {"logprobs": True, "top_logprobs": more["logprobs"]}
        yield replace(ask, body={**ask.body, **more})


def growth(seen: list[Footprint]) -> Growth:
    """From the mean of the first looks after the warm-up to that of the last ones."""
    warm = seen[int(WARM_UP * len(seen)) :]
    few = max(1, len(warm) // 5)

    def share(name: str) -> float:
        values = [getattr(each, name) for each in warm]
        return (sum(values[-few:]) / few) / (sum(values[:few]) / few) - 1

    return Growth(share("front_rss"), share("engine_rss"))


async def run(target: Target, count: int, seed: int) -> Growth:
    """Send requests, some at a time, and look at the processes meanwhile."""
    clients, seen = Clients(target.served.base, target.context, seed), list[Footprint]()
    waiting, sent, begun = asks(random.Random(seed), target.context, count), 0, time.monotonic()

    async def one_after_another() -> None:
        nonlocal sent
        for ask in waiting:
            await clients.send(ask)
            sent += 1
            if sent % max(1, count // LOOKS) == 0:
                seen.append(Footprint.of(target.served))
                front, engine = seen[-1].front_rss / MIB, seen[-1].engine_rss / MIB
                rate = sent / (time.monotonic() - begun)
                line = f"{sent}: {rate:.0f}/s, server {front:.1f} MiB, engine {engine:.1f} MiB"
                print(line, flush=True)

    async with clients.connected(), asyncio.TaskGroup() as group:
        for _ in range(TOGETHER):
            group.create_task(one_after_another())
    print(dict(clients.tally.ends), clients.tally.faults[:3], flush=True)
    return growth(seen)


def main() -> None:
    """Run as many requests as the command line says."""
    count = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        model = write_text_model(Path(folder) / "model")
        with serving(str(model), *ARGUMENTS) as served:
            target = Target(served)
            target.warm_up(400)
            print(asyncio.run(run(target, count, seed=1)))


if __name__ == "__main__":
    main()
