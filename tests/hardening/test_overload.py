"""Overload, and sudden death under it."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error

import pytest

from ..model.checkpoints import POSITIONS
from ..server.serving import PATIENCE, alive, serving, wait_for
from .footprint import MIB
from .load import Ask, Clients, Tally
from .overload import ORDERLY, SHORT_QUEUE, judge, overload, report
from .target import ARGUMENTS, Target

DEATH_SECONDS = PATIENCE
NOTICE_SECONDS = 60.0
"""The API process surely learns within this time that its engine is dead."""
LONGEST = 7000
"""Tokens of a stream that is surely cut off: it takes seven times as long as one that fills the
context of the checkpoint."""
REPETITIONS = 20


def test_an_overloaded_server_answers_or_refuses(text_model, tmp_path):
    """The short form of `python -m tests.hardening.overload`."""
    log = tmp_path / "stderr"
    with serving(str(text_model), *ARGUMENTS, *SHORT_QUEUE, stderr=log) as served:
        target = Target(served)
        tally, watch = asyncio.run(overload(target, seconds=4))
        print(report(tally, watch))
        assert judge(target, tally, watch, growth=64 * MIB) == []
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.full] if n > 0 else []) for n in range(REPETITIONS)],
)
def test_sudden_death(text_model, number):
    """First of a client, then of the engine or the API process, at moments that chance chooses."""
    chance = random.Random(number)
    longer = ("--max-positions", str(LONGEST))
    with serving(str(text_model), *ARGUMENTS, *SHORT_QUEUE, *longer) as served:
        target = Target(served)
        kill_client(target, chance)
        processes = {"engine": served.engine_pid, "front": served.process.pid}
        victim = ("engine", "front")[number % 2]
        tally, fate = asyncio.run(kill_under_load(target, processes[victim], chance))
        print(f"{victim} killed: {dict(tally.ends)}, long stream: {fate}")
        if victim == "engine":
            assert served.process.returncode == 1
            assert fate == "error event"
            assert all("signal 9" in message for message in tally.errors)
            assert tally.ends["broken stream"] == 0
        assert not tally.faults
        lost = {end for end in tally.ends if end.startswith("connection lost")}
        streams = {"error event", "unavailable"} if victim == "engine" else {"broken stream"}
        assert tally.ends.keys() <= ORDERLY | lost | streams
        wait_for(lambda: not any(map(alive, processes.values())), DEATH_SECONDS)


def kill_client(target, chance):
    """Kill a process with many requests under way: the server has everything back."""
    arguments = (target.served.base, str(POSITIONS), "30")
    client = subprocess.Popen([sys.executable, "-m", "tests.hardening.load", *arguments])
    wait_for(lambda: target.served.metrics()["num_requests_running"] >= 4)
    time.sleep(chance.random())
    client.kill()
    client.wait()
    target.check_quiet()
    target.check_room()
    target.check_good_request()


async def kill_under_load(target, pid, chance) -> tuple[Tally, str]:
    """Kill a process of the server; return what clients saw, and one who was mid-stream surely."""
    killed = asyncio.Event()
    body = {"prompt": "x", "max_tokens": target.context - 9, "stream": True, "ignore_eos": True}
    long = Ask("/v1/completions", body)
    async with Clients(target.served.base, POSITIONS, seed=1).connected() as clients:
        fate = asyncio.create_task(clients.send(long))
        loading = asyncio.create_task(clients.overload(20.0, killed.is_set))
        await asyncio.to_thread(wait_until_running, target, fate)
        await asyncio.sleep(0.3 * chance.random())
        os.kill(pid, signal.SIGKILL)
        killed.set()
        async with asyncio.timeout(DEATH_SECONDS):
            await asyncio.gather(loading, fate, asyncio.to_thread(watch_death, target))
    return clients.tally, fate.result()


def wait_until_running(target, fate):
    wait_for(lambda: target.served.metrics()["num_requests_running"] >= 2)
    assert not fate.done()


def watch_death(target):
    """Until the server has exited, /health is 503 or nobody listens."""
    begin = time.monotonic()
    while target.served.process.poll() is None:
        try:
            status = target.served.request("/health")[0]
        except (urllib.error.URLError, OSError):
            status = None
        assert status in (503, None) or time.monotonic() - begin < NOTICE_SECONDS
        time.sleep(0.02)
