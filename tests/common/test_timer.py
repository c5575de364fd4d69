"""A timer that an event loop keeps more exactly than its own."""

import asyncio
import gc
import sys
from pathlib import Path

import pytest

from twolane.common.timer import PreciseTimer


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_it_calls_back_at_the_last_time_set_and_once() -> None:
    rung: list[float] = []

    async def run() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        timer = PreciseTimer(loop, lambda: rung.append(loop.time()))
        begun = loop.time()
        timer.set(begun + 60.0)
        timer.set(begun + 0.0123)
        await asyncio.sleep(0.05)
        timer.set(begun)  # which is past
        await asyncio.sleep(0.01)
        timer.set(loop.time() + 0.01)
        timer.close()
        await asyncio.sleep(0.02)
        return begun, loop.time()

    begun, _ = asyncio.run(run())
    assert len(rung) == 2
    assert rung[0] >= begun + 0.0123


def test_a_callback_may_set_it_again() -> None:
    rung = 0

    async def run() -> None:
        nonlocal rung
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def ring() -> None:
            nonlocal rung
            rung += 1
            if rung < 50:
                timer.set(loop.time() + 0.0001 * (rung % 3))
            else:
                done.set()

        timer = PreciseTimer(loop, ring)
        timer.set(loop.time())
        await done.wait()
        await asyncio.sleep(0.005)
        timer.close()

    asyncio.run(run())
    assert rung == 50


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' timers are no files")
def test_it_leaves_no_file_open() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(20):
            timer = PreciseTimer(loop, lambda: None)
            timer.set(loop.time() + 60.0)
            timer.close()

    gc.collect()
    before = open_files()
    asyncio.run(run())
    assert open_files() <= before
