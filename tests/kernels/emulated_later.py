"""A server on an emulated GPU that captures half of its graphs while it is idle:
`python -m tests.kernels.emulated_later MODEL`. Prints what it said before and after, as JSON."""

import json
import sys
import time
from pathlib import Path

from tests.kernels.emulated import install

GREEDY = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
REQUESTS = [("a", [5, 9, 3, 7, 1, 8, 2], GREEDY, None), ("b", [*range(40, 71)], GREEDY, None)]


def main(path: Path) -> None:
    install()
    from twolane.devices import DeviceSettings
    from twolane.engine.build import assemble
    from twolane.engine.config import EngineConfig
    from twolane.engine.loop import turn
    from twolane.engine.messages import Outputs, Submit
    from twolane.lanes.cuda import launch_thread
    from twolane.lanes.cuda import machine as cuda
    from twolane.lanes.settings import load_shard
    from twolane.sampling import SamplingParams

    launch_thread.LOOK_SECONDS, cuda.FIRST_BUCKETS, cuda.FIRST_SIZES = 1.0, (1,), ()
    device = {"model": str(path), "dtype": "float32", "max_positions": 48, "device": "cuda"}
    settings = DeviceSettings(**device)
    machine = cuda.CudaMachine(*load_shard(settings, "cpu", lambda *_: None), settings)
    sizes_given = {"kv_tokens": 128, "max_running": 4, "page_size": 16, "system": "chunked"}
    options = {"token_budget": "24"}
    config = EngineConfig(**device, **sizes_given, options=options, capture_when_idle=True)
    built = assemble(config, machine, lambda: None, lambda *_: None)
    runner = built.lanes.runner  # type: ignore[attr-defined]

    def ready() -> list[list[int]]:
        return [list(runner.steps.ready), list(runner.passes.ready)]

    def served(suffix: str) -> dict[str, list[int]]:
        said: dict[str, list[int]] = {name: [] for name, *_ in REQUESTS}
        ended = 0

        def hear(outputs: Outputs) -> None:
            nonlocal ended
            for each in outputs.outputs:
                said[each.id.removesuffix(suffix)] += each.tokens
                ended += each.finish is not None

        submits = [Submit(n + suffix, p, SamplingParams(**more)) for n, p, more, _ in REQUESTS]
        turn(built.engine, submits, hear)
        while ended < len(REQUESTS):
            if turn(built.engine, [], hear) is not None:
                time.sleep(0.01)
        return said

    found = {"first": ready(), "shown": [*machine.pass_sizes], "before": served("-1")}
    deadline = time.monotonic() + 600.0
    while ready() != [[1, 2, 4], [*runner.passes.sizes]] and time.monotonic() < deadline:
        time.sleep(0.1)
    found |= {"rest": ready(), "after": served("-2"), "kept": [*machine.pass_sizes]}
    built.close()
    print(json.dumps({**found, "submits": json.dumps(REQUESTS)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
