"""Several ranks on a CPU say what one says, under every system, and do not outlive each other."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.model.checkpoints import VOCAB, make_checkpoint, reference
from tests.parity.judge import Judge, Tally
from tests.parity.prompts import random_requests
from tests.parity.ranks import Ranks
from tests.parity.serving import serve
from twolane.common.errors import FieldError
from twolane.engine.config import EngineConfig
from twolane.engine.messages import Submit
from twolane.engine.settings import check_settings
from twolane.lanes.cpu.machine import CpuMachine
from twolane.lanes.settings import DeviceSettings
from twolane.model.load.hub import resolve
from twolane.model.load.weights import load_decoder
from twolane.parallel.group import RankLost
from twolane.sampling import SamplingParams
from twolane.systems.registry import SYSTEMS, make_system

PAGES, PAGE, RUNNING = 96, 16, 8
ENDS_WITHIN = 10.0
"""Seconds until a server whose rank is lost must have said so."""


def on_cpu(path: Path, size: int) -> Ranks:
    settings = DeviceSettings(model=str(path), device="cpu", tensor_parallel_size=size)
    return Ranks(CpuMachine(settings, lambda *_: None), PAGES, PAGE, RUNNING)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("ranks") / "model", seed=1)


@pytest.fixture(scope="module")
def judge(checkpoint: Path) -> Judge:
    return Judge(reference(checkpoint))


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Ranks]:
    ranks = on_cpu(checkpoint, 2)
    yield ranks
    ranks.close()
    assert [process.returncode for process in ranks.processes] == [0]


@pytest.fixture
def lost(checkpoint: Path) -> Iterator[Ranks]:
    """Ranks of which a test takes one away."""
    ranks = on_cpu(checkpoint, 2)
    yield ranks
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
    ranks.close(1.0)
    assert all(process.poll() is not None for process in ranks.processes)


GREEDY = random_requests(VOCAB)[14:40:3]
SEEDED = [
    Submit(
        f"s{i}",
        [3 + i, 9, 27, 81],
        SamplingParams(temperature=1.0, seed=i, max_tokens=16, repetition_penalty=1.2, logprobs=2),
    )
    for i in range(8)
]
DECIDED: dict[str, list[list[int]]] = {}
"""What the first schedule said."""


@pytest.mark.parametrize("system", SYSTEMS)
def test_two_ranks_say_what_one_says(system: str, two: Ranks, judge: Judge, tally: Tally) -> None:
    """And every system lets them say the same."""
    served = two.serve(make_system(system, {}), [*GREEDY, *SEEDED])
    for request, output in zip(GREEDY, served.outputs, strict=False):
        tally.forgiven += judge.forgiven(request.prompt, output)
        tally.tokens += len(output)
    tally.runs += 1
    tally.side_by_side += served.side_by_side
    assert DECIDED.setdefault("two", served.outputs) == served.outputs


def test_seeded_tokens_are_those_of_one_rank(two: Ranks, checkpoint: Path) -> None:
    decoder = load_decoder(resolve(str(checkpoint)))
    system = make_system("static-split", {})
    alone = serve(
        *(decoder, system, SEEDED),
        pages=PAGES,
        page_size=PAGE,
        running=RUNNING,
        prefix_cache=True,
    )
    assert two.serve(system, SEEDED).outputs == alone.outputs


def test_followers_rest_when_there_is_nothing_to_do(two: Ranks) -> None:
    def used() -> float:
        fields = Path(f"/proc/{two.processes[0].pid}/stat").read_text().rsplit(")")[-1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.2)
    before = used()
    time.sleep(1.0)
    assert used() - before <= 0.02


def serve_until_lost(ranks: Ranks, take_away: Callable[[], None]) -> float:
    """Serve without an end, take a rank away meanwhile; seconds until the engine says so."""
    submits = [
        Submit(f"r{i}", [5, 6, 7 + i], SamplingParams(max_tokens=900, ignore_eos=True))
        for i in range(4)
    ]
    taken: list[float] = []

    def take() -> None:
        taken.append(time.monotonic())
        take_away()

    timer = threading.Timer(0.5, take)
    timer.start()
    with pytest.raises(RankLost):
        ranks.serve(make_system("static-split", {}), submits)
    return time.monotonic() - taken[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_engine(lost: Ranks, number: signal.Signals) -> None:
    took = serve_until_lost(lost, lambda: lost.processes[0].send_signal(number))
    assert took < ENDS_WITHIN


def test_a_rank_that_dies_at_rest_is_noticed(lost: Ranks) -> None:
    news = threading.Event()
    lost.wake = news.set
    lost.processes[0].kill()
    assert news.wait(ENDS_WITHIN)
    with pytest.raises(RankLost, match="rank 1 of 2 has died"):
        lost.lanes.check()


def test_no_rank_outlives_rank_0(checkpoint: Path) -> None:
    script = (
        "import sys, time\n"
        "from twolane.lanes.cpu.machine import CpuMachine\n"
        "from twolane.lanes.settings import DeviceSettings\n"
        "settings = DeviceSettings(model=sys.argv[1], device='cpu', tensor_parallel_size=2)\n"
        "machine = CpuMachine(settings, lambda *_: None)\n"
        "print(machine.followers.processes[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        follower = int(rank_0.stdout.readline())
        rank_0.kill()
    end = time.monotonic() + ENDS_WITHIN
    while _lives(follower):
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_more_than_one_rank_on_a_gpu_is_refused_by_name() -> None:
    config = EngineConfig(model="qwen3-8b", device="cuda", tensor_parallel_size=2)
    with pytest.raises(FieldError) as refused:
        check_settings(config)
    assert refused.value.field == "tensor_parallel_size"
