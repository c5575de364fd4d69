"""A rank that is killed or stopped at any moment ends the engine, and none outlives another."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.model.checkpoints import make_checkpoint
from tests.parity.lost_rank_0 import endless
from tests.parity.ranks import Ranks, on_cpu
from tests.server.serving import PATIENCE, wait_for
from twolane.engine.messages import Submit
from twolane.lanes import base
from twolane.lanes.ranks import cpu_machine, followers
from twolane.lanes.ranks.followers import Heartbeat
from twolane.parallel import group
from twolane.parallel.group import RankLost
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

ENDS_WITHIN = 30.0
"""Seconds until an engine whose rank is lost must have said so; of one that is stopped it takes 8
by itself, and a launch without a prediction may take 60. Nothing is computed meanwhile: a busy
machine adds no more than the delay of a few threads that wake up."""
SHORT_STOP = 2.0
"""Seconds for which a rank may be stopped in most rounds."""
HANGS = 3.0
"""Seconds that a launch may take where a rank hangs; the first one may take longer."""
FULL_ROUNDS = 40
SIGNALS = [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> range:
    """In the short form the third one alone, of two ranks."""
    return range(FULL_ROUNDS) if request.config.getoption("--full") else range(2, 3)


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


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("victim", [1, 4, 7])
def test_a_lost_rank_of_eight_ends_the_engine(
    number: signal.Signals, victim: int, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8}
    path = make_checkpoint("qwen3", tmp_path / "model", seed=1, sizes=sizes)
    ranks = on_cpu(path, 8, 256, 16, 8)
    took, said = lose(ranks, victim, number, 1.0)
    assert took < ENDS_WITHIN
    assert f"rank {victim}" in said, said
    ranks.processes[victim - 1].send_signal(signal.SIGCONT)
    ranks.close(1.0)
    assert not any(_lives(process.pid) for process in ranks.processes)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_lost_rank_ends_the_engine(
    checkpoint: Path, number: signal.Signals, rounds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random moments; of four ranks each may be it."""
    for turn in rounds:
        rng = random.Random(turn)
        if turn:  # the first one waits as long as a server does
            monkeypatch.setattr(followers, "STOPPED_SECONDS", SHORT_STOP)
        size = 2 if turn % 2 == 0 else 4
        ranks, victim = on_cpu(checkpoint, size, 256, 16, 8), rng.randrange(1, size)
        took, said = lose(ranks, victim, number, rng.random() + (0.05 if turn else 0.5))
        assert took < ENDS_WITHIN
        assert f"rank {victim}" in said, said
        ranks.processes[victim - 1].send_signal(signal.SIGCONT)
        ranks.close(1.0)
        assert not any(_lives(process.pid) for process in ranks.processes)


def test_a_rank_that_hangs_in_a_launch_ends_the_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped does where nothing tells that it is."""
    monkeypatch.setattr(followers, "_is_stopped", lambda _: False)
    ranks = on_cpu(checkpoint, 2, 256, 16, 8)
    ranks.serve(make_system("static-split"), [Submit("first", [5, 6, 7], SHORT)])
    monkeypatch.setattr(base, "LAUNCH_TIMEOUT_SECONDS", HANGS)
    monkeypatch.setattr(base, "UNPREDICTED_SECONDS", HANGS)
    took, said = lose(ranks, 1, signal.SIGSTOP, 0.5)
    assert took < ENDS_WITHIN
    assert said.startswith("rank 0 of 2 has waited"), said
    ranks.close(1.0)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGKILL", r"rank 1 of 2 has died \(exit code -9\)"),
        pytest.param(
            "SIGSTOP",
            r"rank 1 of 2 has been stopped for \d+\.\d s",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "SIGCONT",
            "rank 0 of 2 has waited 1 s for rank 1 to connect the decode channel",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_that_is_lost_while_channels_are_connected_ends_the_start(
    checkpoint: Path, how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies, is stopped, or goes on without ever connecting, as with a network that hangs."""
    monkeypatch.setenv("LOST_BY", how)
    monkeypatch.setattr(cpu_machine, "FOLLOWER", "tests.parity.lost_at_start")
    monkeypatch.setattr(followers, "STOPPED_SECONDS", 1.0)
    if how == "SIGCONT":
        monkeypatch.setattr(group, "CONNECT_SECONDS", 1.0)
    begun: list[Any] = []
    spawn = followers.Followers._spawn

    def noted(self: Any, *args: Any) -> None:
        spawn(self, *args)
        begun.append(self)

    monkeypatch.setattr(followers.Followers, "_spawn", noted)
    with pytest.raises(RankLost, match=said):
        on_cpu(checkpoint, 2, 256, 16, 8)
    begun[0].close(0.0)
    assert not any(_lives(process.pid) for process in begun[0].processes)


@pytest.mark.full
def test_a_rank_without_memory_for_its_weights_says_what_to_set(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_machine, "FOLLOWER", "tests.parity.short_of_memory")
    with pytest.raises(RankLost, match=r"rank 1 of 2: gpu_memory_utilization .* 1\.50 GiB more"):
        on_cpu(checkpoint, 2, 256, 16, 8)


@pytest.mark.full
def test_a_rank_that_dies_at_rest_is_noticed(checkpoint: Path) -> None:
    ranks, news = on_cpu(checkpoint, 2, 256, 16, 8), threading.Event()
    ranks.wake = news.set
    ranks.processes[0].kill()
    assert noticed(ranks, news).startswith("rank 1 of 2 has died")
    ranks.close(1.0)


def test_a_rank_that_is_stopped_at_rest_is_noticed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "STOPPED_SECONDS", SHORT_STOP)
    ranks, news = on_cpu(checkpoint, 2, 256, 16, 8), threading.Event()
    served = ranks.serve(make_system("static-split"), [Submit("a", [5, 6, 7], SHORT)])
    assert [len(tokens) for tokens in served.outputs] == [SHORT.max_tokens]
    ranks.wake = news.set
    ranks.processes[0].send_signal(signal.SIGSTOP)
    said = re.fullmatch(r"rank 1 of 2 has been stopped for ([\d.]+) s", noticed(ranks, news))
    assert said and float(said[1]) >= SHORT_STOP
    ranks.processes[0].send_signal(signal.SIGCONT)
    ranks.close(1.0)


@pytest.mark.full
def test_a_rank_that_is_silent_at_rest_may_come_back(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be short of CPU time; only a silence that is far longer is the end."""
    deaf, news = tmp_path / "deaf", threading.Event()
    monkeypatch.setenv("DEAF", str(deaf))
    monkeypatch.setattr(cpu_machine, "FOLLOWER", "tests.parity.deaf_follower")
    monkeypatch.setattr(followers, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(followers, "PING_SECONDS", 0.2)
    ranks = on_cpu(checkpoint, 2, 256, 16, 8)
    wait_for(lambda: 0.0 < ranks.lanes.silences()[0] < 0.5)
    deaf.touch()
    wait_for(lambda: ranks.lanes.silences()[0] > 1.0)
    ranks.lanes.check()
    deaf.unlink()
    wait_for(lambda: ranks.lanes.silences()[0] < 0.5)
    ranks.wake = news.set
    monkeypatch.setattr(base, "UNPREDICTED_SECONDS", 0.9)
    deaf.touch()
    assert noticed(ranks, news).startswith("rank 1 of 2 has not answered for")
    deaf.unlink()
    ranks.close(1.0)


def test_silence_counts_from_the_end_of_work_and_only_for_ranks_that_have_begun() -> None:
    pipes = [os.pipe() for _ in range(2)]
    for read, _ in pipes:
        os.set_blocking(read, False)
    pings: list[float] = []
    pulse, (_, first), (_, second) = Heartbeat([read for read, _ in pipes]), *pipes

    def beat(now: float) -> tuple[int, float] | None:
        return pulse.beat(now, lambda: pings.append(now))

    assert beat(1.0) is None
    assert beat(50.0) is None, "both are starting"
    os.write(second, b".")
    assert beat(60.0) is None
    assert pings == [1.0], "the first is still starting"
    os.write(first, b".")
    assert beat(61.0) == (1, 0.0)
    assert pings == [1.0, 61.0]
    os.write(first, b".")
    assert beat(64.0) == (2, 3.0)
    pulse.skip(70.0)
    assert beat(72.0) == (2, 2.0)
    os.write(second, b".")
    assert pulse.silences(72.25) == [8.25, 12.25]
    assert beat(72.5) == (1, 0.0)
    assert pulse.silences(73.0) == [9.0, 0.5]
    pulse.heard(74.0)
    assert pulse.silences(75.0) == [1.0, 1.0]
    assert pings == [1.0, 61.0, 72.5]
    for pipe in pipes:
        for file in pipe:
            os.close(file)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
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
                wait_for(partial(_sleeps, follower))  # it ends what it has begun
                rank_0.kill()
        wait_for(partial(_has_ended, follower))


def _sleeps(process: int) -> bool:
    """Whether a process takes next to nothing of half a second."""
    before = _cpu_seconds(process)
    time.sleep(0.5)
    return _cpu_seconds(process) - before < 0.1


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def noticed(ranks: Ranks, news: threading.Event) -> str:
    """What is said of a rank that is lost, at the news of it; there may be others before."""
    while news.wait(PATIENCE):
        news.clear()
        try:
            ranks.lanes.check()
        except RankLost as lost:
            return str(lost)
    raise AssertionError("nobody has noticed it")


def _has_ended(process: int) -> bool:
    return not _lives(process)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
