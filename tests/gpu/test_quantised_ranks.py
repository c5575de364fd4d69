"""Two GPUs that share a quantised checkpoint think what one thinks of it."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.serving import LEVELS, PAGE
from tests.model.checkpoints import VOCAB, load_decoder
from tests.model.quantised_checkpoints import write
from tests.parity.ranks import Ranks
from tests.parity.serving import Served, serve
from twolane.devices import DeviceSettings
from twolane.engine.messages import Submit
from twolane.kernels.runtime import nvrtc
from twolane.lanes.load import load
from twolane.model.load.hub import resolve
from twolane.sampling import SamplingParams
from twolane.systems.base import System
from twolane.systems.registry import make_system

PAGES, RUNNING, TOKENS = 256, 8, 12
SIZES = {"hidden_size": 256, "intermediate_size": 512}
"""Whole blocks and groups of columns on two ranks, while keys and values end within blocks."""
SPLIT = {"hidden_size": 256, "intermediate_size": 320}
"""Two ranks would split the second of three blocks of the MLP's columns."""
CASES = {
    **{form: (form, SIZES) for form in ("fp8", "gptq", "awq", "pack-quantized-zeros")},
    "float-quantized-channel": ("float-quantized-channel", SIZES),
    "blocks-split": ("fp8", SPLIT),
}
SYSTEMS = ("static-split", "chunked")
FORCED = 77
"""The token that all say, so that every rank count goes on with the same tokens."""
BIAS = {token: 100.0 if token == FORCED else -100.0 for token in range(VOCAB)}
"""Logits of these models differ by about 100, so a bias of one token would not always decide."""

if torch.cuda.is_available() and not nvrtc.available(torch.device("cuda", 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


def asked() -> list[Submit]:
    """Prompts of several lengths; their log-probabilities and those of what is said are told."""
    draw = torch.Generator().manual_seed(5)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        logit_bias=BIAS,
        logprobs=0,
        prompt_logprobs=0,
    )
    prompts = [torch.randint(3, 250, (n,), generator=draw).tolist() for n in (9, 40, 65, 130)]
    return [Submit(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]


@pytest.fixture
def machines() -> Iterator[list[Ranks]]:
    """Those that end with the test."""
    opened: list[Ranks] = []
    yield opened
    for each in opened:
        each.close()


def thoughts(serve: Callable[[System, list[Submit]], Served]) -> Tensor:
    """The log-probabilities of all tokens, by each system: of prompts, and of decode steps."""
    said = []
    for name in SYSTEMS:
        served = serve(make_system(name, {}), asked())
        assert served.outputs == [[FORCED] * TOKENS] * len(asked())
        lists: list[Any] = [*served.logprobs, *served.prompt_logprobs]
        said += [told.logprob for each in lists for told in each]
    return torch.tensor(said)


def meant(path: Path) -> Tensor:
    """Those of the floats that the checkpoint means, in float32 on the CPU."""
    decoder = load_decoder(resolve(str(path)))
    pool: dict[str, Any] = {"pages": PAGES, "page_size": PAGE, "running": RUNNING}
    return thoughts(partial(serve, decoder, **pool, prefix_cache=True))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_think_what_one_thinks(case: str, tmp_path: Path, machines: list[Ranks]) -> None:
    """They are as far from float32 as one rank is, and not much farther from each other."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    form, sizes = CASES[case]
    write(tmp_path / "quantised", tmp_path / "floats", form, **sizes)

    def on_gpus(ranks: int) -> Tensor:
        settings = DeviceSettings(
            model=str(tmp_path / "quantised"),
            dtype="bfloat16",
            device="cuda",
            levels=LEVELS[1:2],
            tensor_parallel_size=ranks,
            all_reduce="nccl",  # a process maps other GPUs' memory once, and other tests do
            gpu_memory_utilization=0.3,
        )
        machines.append(Ranks(load(settings, lambda *_: None), PAGES, PAGE, RUNNING))
        return thoughts(machines[-1].serve)

    exact, one, two = meant(tmp_path / "floats"), on_gpus(1), on_gpus(2)
    cost, apart, other = (float(x.norm()) for x in (one - exact, two - one, two - exact))
    print(f"{case}: one {cost:.4f}, two {other:.4f} from float32, {apart:.4f} apart", flush=True)
    assert other < 1.25 * cost
    assert apart < 1.5 * cost
