"""Prefill and decode in a process each say what one process says, and do not outlive each other."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_constraints import vocabulary
from tests.model.adapters import make_adapter
from tests.model.checkpoints import VOCAB, load_decoder, make_checkpoint, reference
from tests.parity.constrained import compare as compare_constrained
from tests.parity.constrained import constrained, judges_of
from tests.parity.judge import Judge, Tally
from tests.parity.lost_rank_0 import endless
from tests.parity.prompts import random_requests
from tests.parity.ranks import Ranks, apart, load_where_files_differ, next_turn, two_streams
from tests.parity.serving import serve
from tests.parity.test_lost_ranks import ENDS_WITHIN, SHORT_STOP, _lives, noticed
from tests.parity.test_ranks import SEEDED
from tests.parity.test_tiny import compare
from tests.server.serving import wait_for
from twolane.engine.messages import Submit
from twolane.lanes import base
from twolane.lanes.base import Step
from twolane.lanes.disaggregated import cpu_decode
from twolane.lanes.disaggregated.cpu_decode import DecodeRunner
from twolane.lanes.ranks import followers
from twolane.model.load.hub import resolve
from twolane.parallel.group import RankLost
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

PAGE, RUNNING = 16, 8
PAGES = 34
"""Less than the longest requests need together, so that some are preempted."""
REQUESTS = random_requests(VOCAB)[::2]
ROUNDS, FULL_ROUNDS = 1, 20
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Ranks]:
    ranks = apart(checkpoint, PAGES, PAGE, RUNNING, lora={"some": ""}, max_lora_rank=8)
    yield ranks
    assert ranks.close() == [0]


def test_greedy_tokens_are_those_of_the_reference(two: Ranks, judge: Judge, tally: Tally) -> None:
    compare(REQUESTS, two_streams(two, REQUESTS), judge, tally)


def test_seeded_tokens_and_log_probabilities_are_those_of_one_process(
    two: Ranks, checkpoint: Path
) -> None:
    decoder, system = load_decoder(resolve(str(checkpoint))), make_system("two-stream")
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, logprobs=1)
    asked = [*SEEDED, Submit("scored", list(range(3, 60)), scored)]
    pool = {"pages": PAGES, "page_size": PAGE, "running": RUNNING}
    alone = serve(decoder, system, asked, prefix_cache=True, **pool)  # type: ignore[arg-type]
    served = two.serve(system, asked)
    assert served.outputs == alone.outputs
    ours, theirs = served.prompt_logprobs[-1], alone.prompt_logprobs[-1]
    assert ours is not None
    assert theirs is not None
    assert [each.token for each in ours] == [each.token for each in theirs]
    close = [each.logprob for each in theirs]
    assert [each.logprob for each in ours] == pytest.approx(close, abs=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "gemma4-inputs"])
def test_pages_that_left_a_window_are_written_again_in_both_pools(
    tmp_path: Path, tally: Tally, family: str
) -> None:
    """Layers with inputs of their own have wider hidden states on the way, and not at the end."""
    path = make_checkpoint(family, tmp_path / "model", seed=1)
    ranks, judge = apart(path, PAGES, PAGE, RUNNING), Judge(reference(path))
    served = ranks.serve(make_system("two-stream"), REQUESTS)
    compare(REQUESTS, served, judge, tally)
    assert served.prefix_hits
    assert next_turn(ranks, judge, PAGE).prefix_hits
    assert ranks.close() == [0]


def test_a_next_turn_reuses_what_decode_has_written(two: Ranks, judge: Judge) -> None:
    """The keys and values of generated tokens are in the prefill process's pool, too."""
    next_turn(two, judge, PAGE)


def test_adapters_answer_as_in_one_process(two: Ranks, checkpoint: Path, tmp_path: Path) -> None:
    make_adapter(checkpoint, tmp_path / "some", rank=8, seed=3, strength=0.5)
    adapters, system = {"some": tmp_path / "some"}, make_system("two-stream")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    names = (None, "some", "some")
    asked = [Submit(f"a{i}", [5, 6, 7 + i], params, lora=name) for i, name in enumerate(names)]
    pool = {"pages": PAGES, "page_size": PAGE, "running": RUNNING}
    decoder = load_decoder(resolve(str(checkpoint)))
    alone = serve(decoder, system, asked, prefix_cache=True, adapters=adapters, **pool)  # type: ignore[arg-type]
    plain = [Submit("p", [5, 6, 8], params)]
    assert two.serve(system, asked, adapters).outputs == alone.outputs
    assert two.serve(system, plain).outputs[0] != alone.outputs[1], "the adapter changes nothing"


def test_an_adapter_that_the_other_process_cannot_read_is_refused(
    two: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    assert "have changed" in load_where_files_differ(two, checkpoint, tmp_path)


def test_grammars_hold_for_every_token(two: Ranks, judge: Judge, tally: Tally) -> None:
    """Also for the first, whose mask is computed while the prompt is."""
    submits = constrained(REQUESTS[1::3])
    served = two.serve(make_system("two-stream"), submits, vocabulary=vocabulary())
    compare_constrained(submits, served, judges_of(judge), tally)


@pytest.mark.full
def test_a_prompt_may_take_long_while_its_layers_arrive(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a launch may: rank 1 is not held for lost."""
    monkeypatch.setattr(cpu_decode, "FOLLOWER", "tests.parity.slow_prompts")
    monkeypatch.setattr(base, "LAUNCH_TIMEOUT_SECONDS", 3.0)
    monkeypatch.setattr(base, "UNPREDICTED_SECONDS", 3.0)
    ranks = apart(checkpoint, 256, PAGE, RUNNING)
    began = time.monotonic()
    served = ranks.serve(make_system("two-stream"), [Submit("slow", [5, 6, 7], SHORT)])
    assert time.monotonic() - began > 2 * base.LAUNCH_TIMEOUT_SECONDS
    assert [len(tokens) for tokens in served.outputs] == [SHORT.max_tokens]
    ranks.close()


def lose(ranks: Ranks, number: signal.Signals, after: float) -> tuple[float, str]:
    """Send rank 1 a signal while both serve; seconds until the engine says so, and what."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        ranks.processes[0].send_signal(number)

    threading.Timer(after, send).start()
    with pytest.raises(RankLost) as lost:
        endless(ranks, system="two-stream")
    return time.monotonic() - sent[0], str(lost.value)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_a_prefill_process_that_is_lost_ends_the_engine(
    checkpoint: Path,
    number: signal.Signals,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode steps go on without it, for longer than it may be stopped."""
    decode = DecodeRunner._decode

    def slow(*args: Any) -> Step:
        time.sleep(0.012)
        return decode(*args)

    for turn in range(FULL_ROUNDS if request.config.getoption("--full") else ROUNDS):
        ranks = apart(checkpoint, 256, PAGE, RUNNING)
        ranks.serve(make_system("two-stream"), [Submit("first", [5, 6, 7], SHORT)])
        monkeypatch.setattr(DecodeRunner, "_decode", slow)
        monkeypatch.setattr(followers, "STOPPED_SECONDS", SHORT_STOP)
        took, said = lose(ranks, number, random.Random(turn).random())
        assert took < ENDS_WITHIN
        assert "rank 1" in said, said
        ranks.processes[0].send_signal(signal.SIGCONT)
        ranks.close(1.0)
        assert not _lives(ranks.processes[0].pid)
        monkeypatch.undo()


def test_a_prefill_process_that_dies_at_the_start_ends_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_decode, "FOLLOWER", "tests.parity.nowhere")
    with pytest.raises(RankLost, match=r"rank 1 of 2 has died \(exit code 1\)"):
        apart(checkpoint, 256, PAGE, RUNNING)


@pytest.mark.full
def test_a_prefill_process_that_dies_at_rest_is_noticed(checkpoint: Path) -> None:
    ranks, news = apart(checkpoint, 256, PAGE, RUNNING), threading.Event()
    ranks.wake = news.set
    ranks.processes[0].kill()
    assert noticed(ranks, news).startswith("rank 1 of 2 has died")
    ranks.close(1.0)


@pytest.mark.full
def test_the_prefill_process_does_not_outlive_rank_0(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "tests.parity.lost_rank_0", str(checkpoint), "apart"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        follower = int(rank_0.stdout.readline())
        rank_0.kill()
    wait_for(lambda: not _lives(follower))
