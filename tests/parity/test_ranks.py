"""Several ranks on a CPU say what one says, under every system, and do not outlive each other."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.checkpoints import VOCAB, load_decoder, make_checkpoint, reference
from tests.parity.judge import Judge, Tally
from tests.parity.prompts import random_requests
from tests.parity.ranks import Ranks, load_where_files_differ, on_cpu
from tests.parity.serving import serve
from tests.parity.test_tiny import compare
from tests.server.serving import wait_for
from tests.systems.names import SYSTEM_NAMES
from twolane.engine.messages import Submit
from twolane.model.load.hub import resolve
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system

PAGES, PAGE, RUNNING = 96, 16, 8


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Ranks]:
    ranks = on_cpu(checkpoint, 2, PAGES, PAGE, RUNNING, lora={"some": ""}, max_lora_rank=8)
    yield ranks
    assert ranks.close() == [0]


GREEDY = random_requests(VOCAB)[14:40:3]
SEEDED = [
    Submit(
        f"s{i}",
        [3 + i, 9, 27, 81],
        SamplingParams(temperature=1.0, seed=i, max_tokens=16, repetition_penalty=1.2, logprobs=2),
    )
    for i in range(8)
]
QUICK = ("prefill-first", "chunked", "static-split", "drift", "auto")
"""The whole device, hybrid batches, two lanes, and levels that change."""
DECIDED: dict[str, list[list[int]]] = {}
"""What the first schedule said."""


@pytest.mark.parametrize(
    "system",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in SYSTEM_NAMES],
)
def test_two_ranks_say_what_one_says(system: str, two: Ranks, judge: Judge, tally: Tally) -> None:
    """And every system lets them say the same."""
    served = two.serve(make_system(system, {}), [*GREEDY, *SEEDED])
    for request, output in zip(GREEDY, served.outputs, strict=False):
        tally.forgiven += judge.forgiven(request.prompt, output)
        tally.tokens += len(output)
    tally.runs += 1
    tally.side_by_side += served.side_by_side
    assert DECIDED.setdefault("two", served.outputs) == served.outputs


def test_ranks_give_the_pages_of_windows_back_alike(tmp_path: Path, tally: Tally) -> None:
    """A pool that holds the requests' windows, but not their whole contexts in all layers."""
    path = make_checkpoint("olmo3", tmp_path / "model", seed=1)
    ranks, judge = on_cpu(path, 2, 48, PAGE, RUNNING), Judge(reference(path))
    requests = random_requests(VOCAB)[::3]
    for system in ("two-stream", "bullet"):
        served = ranks.serve(make_system(system, {}), requests)
        compare(requests, served, judge, tally)
        assert served.prefix_hits
    assert ranks.close() == [0]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_eight_ranks_say_what_one_says(kv_heads: int, tmp_path: Path, tally: Tally) -> None:
    """Under every system; with four KV heads each is on two ranks."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    path = make_checkpoint("qwen3", tmp_path / "model", seed=1, sizes=sizes)
    judge, decided = Judge(reference(path)), []
    ranks = on_cpu(path, 8, PAGES, PAGE, RUNNING)
    for system in SYSTEM_NAMES:
        served = ranks.serve(make_system(system, {}), [*GREEDY, *SEEDED])
        decided.append(served.outputs)
        for request, output in zip(GREEDY, served.outputs, strict=False):
            tally.forgiven += judge.forgiven(request.prompt, output)
            tally.tokens += len(output)
        tally.runs += 1
        tally.side_by_side += served.side_by_side
    assert set(ranks.close()) == {0}
    assert all(outputs == decided[0] for outputs in decided)


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


def test_an_adapter_that_another_rank_cannot_read_is_refused_and_the_ranks_go_on(
    two: Ranks, checkpoint: Path, tmp_path: Path
) -> None:
    assert "have changed" in load_where_files_differ(two, checkpoint, tmp_path)
    assert two.serve(make_system("static-split", {}), SEEDED[:1]).outputs


def test_followers_rest_when_there_is_nothing_to_do(two: Ranks) -> None:
    def used() -> float:
        fields = Path(f"/proc/{two.processes[0].pid}/stat").read_text().rsplit(")")[-1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rested() -> bool:
        before = used()
        time.sleep(1.0)
        return used() - before <= 0.02

    wait_for(rested)  # what it did before may take a while to end
