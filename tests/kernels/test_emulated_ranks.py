"""The start, lanes, graphs and launch log of two ranks as on GPUs, which are emulated here."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
    """Both ranks make the same collectives in the same order, or they would wait for ever."""
    path = make_checkpoint("qwen3", tmp_path / "model", seed=1, layers=3)
    adapter = make_adapter(path, tmp_path / "tuned", rank=5)
    command = [sys.executable, "-m", "tests.kernels.emulated_ranks", str(path), "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=2300)
    assert ran.returncode == 0
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["codes"] == [0]
    submits = [
        Submit(name, prompt, SamplingParams(**params), lora=lora)
        for name, prompt, params, lora in json.loads(found["submits"])
    ]
    alone = serve(
        *(load_decoder(resolve(str(path))), make_system("static-split", {}), submits),
        pages=12,
        page_size=16,
        running=4,
        prefix_cache=True,
        adapters={"tuned": adapter},
    )
    assert list(found["said"]) == ["static-split", "chunked", "random"]
    for name, said in found["said"].items():
        assert said == alone.outputs, name
