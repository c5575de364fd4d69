"""A CUDA kernel that does not end: the engine is killed, and the GPU is free again."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.model.checkpoints import make_checkpoint
from tests.server.serving import alive, engine_of
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Output, Progress, Submit
from twolane.frontend.engine_client import EngineClient, EngineGone, Event
from twolane.sampling import SamplingParams

SPIN = """
import sys
if "twolane.engine" in sys.orig_argv:
    import faulthandler
    import signal
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
    faulthandler.register(signal.SIGUSR1)
"""
"""Queues a kernel that spins for as many seconds as a file says before the next decode step."""


BEGUN_AT = time.monotonic()


def say(what: object) -> None:
    """Print where the test stands: what hangs on a GPU leaves nothing else."""
    print(f"{time.monotonic() - BEGUN_AT:6.1f} s: {what}", flush=True)


async def within(seconds: float, what: str, waited: Awaitable[object]) -> None:
    """Await something; if it takes longer, the engine shows where its threads stand."""
    try:
        async with asyncio.timeout(seconds):
            await waited
    except TimeoutError:
        if pid := engine_of(os.getpid()):
            os.kill(pid, signal.SIGUSR1)
            await asyncio.sleep(1.0)
        raise AssertionError(f"not within {seconds:g} s: {what}") from None
    say(what)


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    while not condition():
        await asyncio.sleep(0.01)


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
        waited = until(lambda: self.tokens >= tokens or self.ending.is_set())
        await within(30, f"{tokens} tokens", waited)
        assert self.tokens >= tokens, self.last


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that makes the next decode step of engines of this test spin."""
    flag = tmp_path / "spin"
    (tmp_path / "sitecustomize.py").write_text(SPIN.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return flag


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint("qwen2", tmp_path_factory.mktemp("gpu") / "qwen2", seed=1)
    return EngineConfig(
        model=str(path),
        dtype="float32",  # in bfloat16 a first start compiles and times products
        kv_tokens=4096,
        max_running=2,
        levels=(64,),
        system="static-split",
    )


@asynccontextmanager
async def started(config: EngineConfig, watchdog: bool) -> AsyncIterator[EngineClient]:
    told = ""

    def tell(progress: Progress) -> None:
        nonlocal told
        if progress.stage != told:
            told = progress.stage
            say(told)

    start = EngineClient.start(config, tell, hang_seconds=1.0, watchdog=watchdog)
    starting = asyncio.create_task(start)
    await within(240, "the engine is ready", asyncio.shield(starting))
    engine = starting.result()
    try:
        yield engine
    finally:
        await engine.close()


def spin(flag: Path, seconds: float) -> None:
    """Have the next decode step spin for so long."""
    written = flag.with_suffix(".new")
    written.write_text(str(seconds))
    written.rename(flag)  # the engine looks at every step


def test_a_kernel_that_takes_long_is_told_and_forgiven(config: EngineConfig, flag: Path) -> None:
    async def run() -> None:
        async with started(config, watchdog=False) as engine:
            answer = Answer(engine)
            await answer.begun()
            spin(flag, 12)
            await within(20, "a problem is told", until(lambda: engine.liveness.problem))
            before, problem = answer.tokens, str(engine.liveness.problem)
            assert "the decode lane has finished nothing for" in problem
            await within(20, "it is forgiven", until(lambda: not engine.liveness.problem))
            await answer.begun(before + 20)
            assert isinstance(answer.last, Output), answer.last

    asyncio.run(run())


def test_a_kernel_that_never_ends_is_killed_and_leaves_the_gpu_usable(
    config: EngineConfig, flag: Path
) -> None:
    async def run() -> None:
        async with started(config, watchdog=True) as engine:
            answer = Answer(engine)
            await answer.begun()
            spin(flag, 60)
            await within(20, "the answer has ended", answer.ending.wait())
            assert isinstance(answer.last, EngineGone)
            assert "the decode lane has finished nothing for" in answer.last.message
            assert "the watchdog has killed the engine" in str(engine.failure)
            pid = engine.process.pid
            await within(40, "the process is gone", until(lambda: not alive(pid)))
        async with started(config, watchdog=True) as engine:
            answer = Answer(engine)
            await answer.begun()
            say("another engine answers")

    asyncio.run(run())
