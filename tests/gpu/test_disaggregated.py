"""Prefill and decode on a GPU each say what transformers says; as `tests.parity`."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.engine.test_constraints import vocabulary
from tests.gpu.serving import PAGE, mark_unwritten, needs_to_map_memory
from tests.gpu.serving import serve as serve_on_one
from tests.gpu.test_ranks import SEEDED, needs
from tests.model.adapters import make_adapter
from tests.model.checkpoints import VOCAB, make_checkpoint, reference
from tests.parity import serving
from tests.parity.constrained import compare as compare_constrained
from tests.parity.constrained import constrained, judges_of
from tests.parity.judge import Judge, Tally
from tests.parity.lost_rank_0 import endless
from tests.parity.prompts import random_requests
from tests.parity.ranks import Ranks, next_turn, two_streams
from tests.parity.test_tiny import compare
from twolane.devices import DeviceSettings
from twolane.engine.messages import Abort, Outputs, Submit
from twolane.lanes.cuda.machine import CudaMachine
from twolane.lanes.disaggregated.cuda_decode import DisaggregatedCudaMachine
from twolane.lanes.settings import load_shard
from twolane.parallel.group import RankLost
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

RUNNING = 8
PAGES = 34
"""Less than the longest requests need together, so that some are preempted."""
REQUESTS = random_requests(VOCAB)
ENDS_WITHIN = 10.0
"""Seconds from the loss of rank 1 until the engine says so."""
LEFT_AT = 3
"""Tokens after which a client has lost interest."""


def settings_of(path: Path, **more: object) -> DeviceSettings:
    return DeviceSettings(
        model=str(path),
        dtype="float32",
        device="cuda",
        disaggregated=True,
        gpu_memory_utilization=0.5,
        **more,  # type: ignore[arg-type]
    )


def on_two(settings: DeviceSettings, pages: int = PAGES) -> Ranks:
    """Two GPUs, of which the second one computes prompts; what nobody wrote is no number."""
    needs(2)
    needs_to_map_memory()
    ranks = Ranks(DisaggregatedCudaMachine(settings, lambda *_: None), pages, PAGE, RUNNING)
    pool = ranks.lanes._lanes.runner.kv
    mark_unwritten((*pool.layers, *pool.other.layers))
    return ranks


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Ranks]:
    ranks = on_two(settings_of(checkpoint, lora_endpoints=True, max_loras=1, max_lora_rank=8))
    yield ranks
    assert ranks.close() == [0]


def test_greedy_tokens_are_those_of_the_reference(two: Ranks, judge: Judge, tally: Tally) -> None:
    compare(REQUESTS, two_streams(two, REQUESTS), judge, tally)


def test_pages_that_left_a_window_are_written_again_in_both_pools(
    tmp_path: Path, tally: Tally
) -> None:
    path = make_checkpoint("gemma3", tmp_path / "model", seed=1)
    ranks, judge = on_two(settings_of(path)), Judge(reference(path))
    served = ranks.serve(make_system("two-stream"), REQUESTS)
    compare(REQUESTS, served, judge, tally)
    assert served.prefix_hits
    assert ranks.close() == [0]


def test_a_next_turn_reuses_what_decode_has_written(two: Ranks, judge: Judge) -> None:
    """The keys and values of generated tokens are in the pool of the GPU that prefills, too."""
    assert next_turn(two, judge, PAGE).prefix_hits


class Leaving(serving.LocalPort):
    """Every third request is aborted when it has a few tokens."""

    def send(self, outputs: Outputs) -> None:
        """What an aborted one has still got is no news."""
        left = self.finish.keys()
        super().send(replace(outputs, outputs=[o for o in outputs.outputs if o.id not in left]))
        for name in sorted(self._unfinished):
            if int(name) % 3 == 0 and len(self.tokens[name]) >= LEFT_AT:
                self._now.append(Abort(name))
                self._unfinished.remove(name)
                self.finish[name] = "abort"
                self._woken.set()


def test_aborts_leave_the_others_their_pages(
    two: Ranks, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LocalPort", Leaving)
    asked = [Submit(str(i), one.prompt, one.params) for i, one in enumerate(REQUESTS)]
    served = two.serve(make_system("two-stream"), asked)
    assert "abort" in served.finish
    for one, output in zip(asked, served.outputs, strict=True):
        judge.forgiven(one.prompt, output)


def test_seeded_tokens_and_log_probabilities_are_those_of_one_gpu(
    two: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    """And answers of an adapter."""
    make_adapter(checkpoint, tmp_path / "some", rank=8, seed=3, strength=0.5)
    system, adapters = make_system("two-stream"), {"some": tmp_path / "some"}
    scored = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, logprobs=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [
        *SEEDED,
        Submit("scored", list(range(3, 60)), scored),
        *(Submit(f"a{i}", [5, 6, 7 + i], greedy, lora="some") for i in range(2)),
    ]
    spec, weights = load_shard(settings_of(checkpoint), "cuda", lambda *_: None)
    machine = CudaMachine(
        spec,
        weights,
        DeviceSettings(
            model="",
            levels=(),
            gpu_memory_utilization=0.8,
            lora_endpoints=True,
            max_loras=1,
            max_lora_rank=8,
        ),
    )
    one = {"pages": 256, "running": RUNNING, "prefix_cache": True, "adapters": adapters}
    alone = serve_on_one(machine, system, asked, **one)  # type: ignore[arg-type]
    served = two.serve(system, asked, adapters)
    assert served.outputs == alone.outputs
    place = len(SEEDED)
    ours, theirs = served.prompt_logprobs[place], alone.prompt_logprobs[place]
    assert ours is not None
    assert theirs is not None
    close = [each.logprob for each in theirs]
    assert [each.logprob for each in ours] == pytest.approx(close, abs=1e-4)


def test_grammars_hold_for_every_token(two: Ranks, judge: Judge, tally: Tally) -> None:
    """Also for the first, whose mask is computed while the prompt is."""
    submits = constrained(REQUESTS[1::5])
    served = two.serve(make_system("two-stream"), submits, vocabulary=vocabulary())
    compare_constrained(submits, served, judges_of(judge), tally)


LOST = [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize("number", LOST, ids=lambda number: number.name)
def test_a_prefill_process_that_is_lost_ends_the_engine(
    checkpoint: Path, number: signal.Signals
) -> None:
    ranks = on_two(settings_of(checkpoint), 256)
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        ranks.processes[0].send_signal(number)

    threading.Timer(1.0, send).start()
    with pytest.raises(RankLost, match="rank 1"):
        endless(ranks, system="two-stream")
    took = time.monotonic() - sent[0]
    print(f"told after {took:.2f} s")
    assert took < ENDS_WITHIN
    ranks.processes[0].send_signal(signal.SIGCONT)
    ranks.close(1.0)


def test_over_an_fp8_kv_cache_tokens_are_those_of_one_gpu(checkpoint: Path) -> None:
    """Numbers and their exponents are in both pools; greedy answers part at near-ties alone."""
    settings = settings_of(checkpoint, kv_cache_dtype="fp8")
    ranks = on_two(settings)
    served = ranks.serve(make_system("two-stream"), REQUESTS)
    ranks.close()
    spec, weights = load_shard(settings, "cuda", lambda *_: None)
    machine = CudaMachine(
        spec,
        weights,
        DeviceSettings(model="", levels=(), gpu_memory_utilization=0.8, kv_cache_dtype="fp8"),
    )
    one = {"pages": 256, "running": RUNNING, "prefix_cache": True}
    alone = serve_on_one(machine, make_system("two-stream"), REQUESTS, **one)  # type: ignore[arg-type]
    same = sum(a == b for a, b in zip(served.outputs, alone.outputs, strict=True))
    print(f"{same} of {len(REQUESTS)} answers are the same")
    assert same >= 0.9 * len(REQUESTS)
