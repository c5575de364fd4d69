"""1P1D on two emulated GPUs serves some requests: `python -m tests.kernels.emulated_apart MODEL`.

Two of them have the adapter that lies beside the model. Prints what was said, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.kernels.emulated import install

GREEDY = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
PENALISED = {"temperature": 0.0, "max_tokens": 4, "repetition_penalty": 1.3, "logprobs": 1}
SCORED = {"temperature": 0.0, "max_tokens": 2, "prompt_logprobs": 1}
REQUESTS: list[tuple[str, list[int], dict[str, Any], str | None]] = [
    ("a", [5, 9, 3, 7, 1, 8, 2], GREEDY, None),
    ("b", [*range(40, 71)], GREEDY, "tuned"),
    ("c", [11, 12], PENALISED, None),
    ("d", [*range(100, 120)], GREEDY, "tuned"),
    ("e", [*range(100, 117)], SCORED, None),
    ("f", [*range(100, 131)], {**GREEDY, "max_tokens": 20}, None),
    ("g", [*range(100, 120), 3], GREEDY, None),
]


def main(path: Path, *options: str) -> None:
    install()
    import torch

    from tests.parity.ranks import Ranks
    from twolane.devices import DeviceSettings
    from twolane.engine.messages import Submit
    from twolane.kernels.pool import RoundedPool
    from twolane.lanes.disaggregated.cuda_decode import DisaggregatedCudaMachine
    from twolane.sampling import SamplingParams
    from twolane.systems.registry import make_system

    settings = DeviceSettings(
        model=str(path),
        dtype="float32",
        max_positions=64,
        device="cuda",
        disaggregated=True,
        lora_endpoints=True,
        max_loras=1,
        kv_cache_dtype="fp8" if "fp8" in options else "auto",
    )
    ranks = Ranks(DisaggregatedCudaMachine(settings, lambda *_: None), 10, 16, 4)
    print("started", file=sys.stderr, flush=True)
    pool = ranks.lanes._lanes.runner.kv
    for layer in (*pool.layers, *pool.other.layers):
        if isinstance(layer, RoundedPool):
            layer.values.view(torch.uint8).fill_(0x7F)
        else:
            layer.fill_(float("nan"))
    submits = [
        Submit(name, prompt, SamplingParams(**params), lora=lora)
        for name, prompt, params, lora in REQUESTS
    ]
    adapters = {"tuned": path.with_name("tuned")}
    served = ranks.serve(make_system("two-stream"), submits, adapters)
    codes = ranks.close()
    found = {"said": served.outputs, "hits": served.prefix_hits, "codes": codes}
    print(json.dumps({**found, "submits": json.dumps(REQUESTS)}))


if __name__ == "__main__":
    if os.environ.get("STACKS"):
        import faulthandler

        faulthandler.dump_traceback_later(float(os.environ["STACKS"]), exit=True)
    main(Path(sys.argv[1]), *sys.argv[2:])
