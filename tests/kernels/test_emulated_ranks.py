"""The start, lanes, graphs and launch log of two processes as on GPUs, which are emulated here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model.adapters import make_adapter
from tests.model.checkpoints import load_decoder, make_checkpoint
from tests.parity.serving import serve
from twolane.engine.messages import Submit
from twolane.model.load.hub import resolve
from twolane.sampling import SamplingParams
from twolane.systems.registry import make_system


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_ranks_say_what_one_says(tmp_path: Path) -> None:
    """Both ranks make the same collectives in the same order, or they would wait for ever.

    By rank 0's times passes of 16 rows are padded to 32; by the other rank's they would not be.
    """
    path = make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=3)
    adapter = make_adapter(path, tmp_path / "tuned", rank=5)
    found = ran("tests.kernels.emulated_ranks", str(path), "2")
    assert list(found["said"]) == ["static-split", "chunked", "random"]
    assert found["sizes"] == [32, 64]
    right = alone(path, adapter, found)
    for name, said in found["said"].items():
        assert said == right, name


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("options", [(), ("fp8",)])
def test_prefill_and_decode_on_a_gpu_each_say_what_one_says(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Both processes write both pools, whose numbers may be rounded."""
    path = make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=3)
    adapter = make_adapter(path, tmp_path / "tuned", rank=5)
    found = ran("tests.kernels.emulated_apart", str(path), *options)
    assert found["hits"]
    assert found["said"] == alone(path, adapter, found, rounded=bool(options))


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_graphs_that_are_captured_while_idle_change_no_token(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=3)
    adapter = make_adapter(path, tmp_path / "tuned", rank=5)
    found = ran("tests.kernels.emulated_later", str(path))
    (steps, passes), (all_steps, all_passes) = found["first"], found["rest"]
    assert set(steps) < set(all_steps)
    assert passes == found["shown"]  # systems choose passes that have graphs
    assert set(passes) <= set(all_passes) == set(found["kept"])
    assert found["before"] == found["after"]
    assert [*found["before"].values()] == alone(path, adapter, found)


def ran(module: str, *arguments: str) -> Any:
    """What a module prints that serves on emulated GPUs."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, timeout=2300
    )
    assert ended.returncode == 0
    found = json.loads(ended.stdout.splitlines()[-1])
    assert not any(found.get("codes", ()))
    return found


def alone(path: Path, adapter: Path, found: Any, *, rounded: bool = False) -> list[list[int]]:
    """What one process on a CPU says of the same requests."""
    submits = [
        Submit(name, prompt, SamplingParams(**params), lora=lora)
        for name, prompt, params, lora in json.loads(found["submits"])
    ]
    served = serve(
        *(load_decoder(resolve(str(path))), make_system("static-split", {}), submits),
        pages=12,
        page_size=16,
        running=4,
        prefix_cache=True,
        rounded=rounded,
        adapters={"tuned": adapter},
    )
    return served.outputs
