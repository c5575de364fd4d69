"""Two ranks on emulated GPUs serve some requests: `python -m tests.kernels.emulated_ranks MODEL`.

Two of them have the adapter that lies beside the model. Prints what each schedule said, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.kernels.emulated import install

GREEDY = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
PENALISED = {"temperature": 0.0, "max_tokens": 4, "repetition_penalty": 1.3, "logprobs": 1}
REQUESTS: list[tuple[str, list[int], dict[str, Any], str | None]] = [
    ("a", [5, 9, 3, 7, 1, 8, 2], GREEDY, None),
    ("b", [*range(40, 71)], GREEDY, "tuned"),
    ("c", [11, 12], PENALISED, None),
    ("d", [*range(100, 120)], GREEDY, "tuned"),
]


def main(path: Path, size: int) -> None:
    install()
    from tests.engine.random_plans import RandomPlans
    from tests.parity.ranks import Ranks
    from twolane.devices import DeviceSettings
    from twolane.engine.messages import Submit
    from twolane.lanes.ranks.cuda_machine import RankedCudaMachine
    from twolane.sampling import SamplingParams
    from twolane.systems.plan import Plan
    from twolane.systems.registry import make_system
    from twolane.systems.view import View

    class Restless(RandomPlans):
        """Plans that launch nothing are followed by others, or the engine would sleep for ever."""

        def plan(self, view: View, memory: int) -> tuple[Plan, int]:
            made, memory = super().plan(view, memory)
            return replace(made, wake_at=view.now + 0.01), memory

    settings = DeviceSettings(
        model=str(path),
        dtype="float32",
        max_positions=64,
        device="cuda",
        tensor_parallel_size=size,
        all_reduce="auto",
        lora_endpoints=True,
        max_loras=1,
    )
    machine = RankedCudaMachine(settings, lambda *_: None)
    ranks = Ranks(machine, 12, 16, 4)
    print("started", file=sys.stderr, flush=True)
    said = {}
    systems = {
        "static-split": make_system("static-split", {"slice_seconds": "0"}),
        "chunked": make_system("chunked", {"token_budget": "24"}),
        "random": Restless(1),
    }
    submits = [
        Submit(name, prompt, SamplingParams(**params), lora=lora)
        for name, prompt, params, lora in REQUESTS
    ]
    for name, system in systems.items():
        said[name] = ranks.serve(system, submits, {"tuned": path.with_name("tuned")}).outputs
        print(name, file=sys.stderr, flush=True)
    codes = ranks.close()
    found = {"said": said, "codes": codes, "sizes": machine.pass_sizes}
    print(json.dumps({**found, "submits": json.dumps(REQUESTS)}))


if __name__ == "__main__":
    if os.environ.get("STACKS"):
        import faulthandler

        faulthandler.dump_traceback_later(float(os.environ["STACKS"]), exit=True)
    main(Path(sys.argv[1]), int(sys.argv[2]))
