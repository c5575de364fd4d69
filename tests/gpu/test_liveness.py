"""A CUDA kernel that does not end: the engine is killed, and the GPU is free again."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.model.checkpoints import make_checkpoint
from tests.server.serving import alive, wait_for
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Output, Submit
from twolane.frontend.engine_client import EngineClient, EngineGone, Event
from twolane.sampling import SamplingParams

SPIN = """
import sys
if "twolane.engine" in sys.orig_argv:
    from pathlib import Path
    import torch
    from twolane.lanes.cuda import runner

    run = runner.CudaRunner.run

    def spinning(self, work, lane, *rest):
        flag = Path({flag!r})
        if lane == "decode" and flag.exists():
            seconds = float(flag.read_text())
            flag.unlink()
            torch.cuda._sleep(int(seconds * 1.7e9))  # cycles
        return run(self, work, lane, *rest)

    runner.CudaRunner.run = spinning
"""
"""Queues a kernel that spins for as many seconds as a file says before the next decode step."""


class Answer:
    """One long answer under way."""

    def __init__(self, engine: EngineClient) -> None:
        self.tokens, self.ending = 0, asyncio.Event()
        self.last: Event | None = None
        params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
        engine.submit(Submit(str(time.monotonic()), [5, 6, 7], params), self._take)

    def _take(self, event: Event) -> None:
        self.last = event
        if isinstance(event, Output):
            self.tokens += len(event.tokens)
        if not isinstance(event, Output) or event.finish is not None:
            self.ending.set()

    async def begun(self, tokens: int = 20) -> None:
        async with asyncio.timeout(60):
            while self.tokens < tokens:
                await asyncio.sleep(0.01)


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that makes the next decode step of engines of this test spin."""
    import os

    flag = tmp_path / "spin"
    (tmp_path / "sitecustomize.py").write_text(SPIN.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return flag


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint("qwen2", tmp_path_factory.mktemp("gpu") / "qwen2", seed=1)
    return EngineConfig(
        model=str(path), kv_tokens=4096, max_running=2, levels=(64,), system="static-split"
    )


@asynccontextmanager
async def started(config: EngineConfig, watchdog: bool) -> AsyncIterator[EngineClient]:
    engine = await EngineClient.start(config, hang_seconds=1.0, watchdog=watchdog)
    try:
        yield engine
    finally:
        await engine.close()


async def until_problem(engine: EngineClient) -> str:
    async with asyncio.timeout(30):
        while engine.liveness.problem is None:
            await asyncio.sleep(0.05)
    return str(engine.liveness.problem)


def test_a_kernel_that_takes_long_is_told_and_forgiven(config: EngineConfig, flag: Path) -> None:
    async def run() -> None:
        async with started(config, watchdog=False) as engine:
            answer = Answer(engine)
            await answer.begun()
            flag.write_text("8")
            problem, before = await until_problem(engine), answer.tokens
            assert "the decode lane has finished nothing for" in problem
            async with asyncio.timeout(40):
                while engine.liveness.problem is not None:
                    await asyncio.sleep(0.05)
            await answer.begun(before + 20)
            assert not answer.ending.is_set()

    asyncio.run(run())


def test_a_kernel_that_never_ends_is_killed_and_leaves_the_gpu_usable(
    config: EngineConfig, flag: Path
) -> None:
    async def run() -> None:
        async with started(config, watchdog=True) as engine:
            answer = Answer(engine)
            await answer.begun()
            hung_at = time.monotonic()
            flag.write_text("60")
            async with asyncio.timeout(30):
                await answer.ending.wait()
            told = time.monotonic() - hung_at
            assert isinstance(answer.last, EngineGone)
            assert "the decode lane has finished nothing for" in answer.last.message
            assert "the watchdog has killed the engine" in str(engine.failure)
            pid = engine.process.pid
            await asyncio.to_thread(wait_for, lambda: not alive(pid), 40.0)
            print(f"told after {told:.1f} s, gone after {time.monotonic() - hung_at:.1f} s")
        async with started(config, watchdog=True) as engine:
            answer = Answer(engine)
            await answer.begun()
            print(f"another engine answers after {time.monotonic() - hung_at:.1f} s")

    asyncio.run(run())
