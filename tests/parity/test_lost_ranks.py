"""A rank that is killed or stopped at any moment ends the engine, and none outlives another."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.model.checkpoints import make_checkpoint
from tests.parity.lost_rank_0 import endless
from tests.parity.ranks import Ranks, on_cpu
from twolane.lanes import base
from twolane.parallel.group import RankLost

ENDS_WITHIN = 10.0
"""Seconds until an engine whose rank is lost must have said so."""
ROUNDS, FULL_ROUNDS = 2, 40
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("lost") / "model", seed=1)


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> range:
    return range(FULL_ROUNDS if request.config.getoption("--full") else ROUNDS)


def lose(ranks: Ranks, victim: int, number: signal.Signals, after: float) -> tuple[float, str]:
    """Send a rank a signal while all serve; seconds until the engine says so, and what."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        ranks.processes[victim - 1].send_signal(number)

    threading.Timer(after, send).start()
    with pytest.raises(RankLost) as lost:
        endless(ranks)
    return time.monotonic() - sent[0], str(lost.value)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_lost_rank_ends_the_engine(
    checkpoint: Path, number: signal.Signals, rounds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random moments; of four ranks each may be it."""
    for turn in rounds:
        rng = random.Random(turn)
        if turn:  # the first one waits as long as a server does
            monkeypatch.setattr(base, "PATIENCE_SECONDS", 1.0)
            monkeypatch.setattr(base, "UNPREDICTED_SECONDS", 1.0)
        size = 2 if turn % 2 == 0 else 4
        ranks, victim = on_cpu(checkpoint, size, 256, 16, 8), rng.randrange(1, size)
        took, said = lose(ranks, victim, number, rng.random() + (0.05 if turn else 0.5))
        assert took < ENDS_WITHIN
        assert f"rank {victim}" in said, said
        ranks.processes[victim - 1].send_signal(signal.SIGCONT)
        ranks.close(1.0)
        assert not any(_lives(process.pid) for process in ranks.processes)


def test_a_rank_that_dies_at_rest_is_noticed(checkpoint: Path) -> None:
    ranks, news = on_cpu(checkpoint, 2, 256, 16, 8), threading.Event()
    ranks.wake = news.set
    ranks.processes[0].kill()
    assert news.wait(ENDS_WITHIN)
    with pytest.raises(RankLost, match="rank 1 of 2 has died"):
        ranks.lanes.check()
    ranks.close(1.0)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", SIGNALS)
def test_no_rank_outlives_rank_0(checkpoint: Path, number: signal.Signals, rounds: range) -> None:
    """One that was stopped is killed by the server's watchdog; until then the others sleep."""
    for turn in rounds:
        command = [sys.executable, "-m", "tests.parity.lost_rank_0", str(checkpoint)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
            assert rank_0.stdout is not None
            follower = int(rank_0.stdout.readline())
            time.sleep(random.Random(turn).random())
            rank_0.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(0.3)
                before = _cpu_seconds(follower)
                time.sleep(0.5)
                assert _cpu_seconds(follower) - before < 0.1
                rank_0.kill()
        end = time.monotonic() + ENDS_WITHIN
        while _lives(follower):
            assert time.monotonic() < end, "an orphan"
            time.sleep(0.05)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
