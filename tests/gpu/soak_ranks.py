"""Random schedules over several GPUs with delays: `python -m tests.gpu.soak_ranks 2 --seconds 60`.

Every schedule must say what the first one says, which is held against transformers; tokens that
differ where the reference's two best lie close together are counted as forgiven.
"""

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE = 40.0
"""Seconds after which a schedule that has not ended counts as a hang: the stacks are printed."""
TELL_SECONDS = 10.0
JUDGED = "abceg"
"""Requests that are greedy and nothing else, which the reference can be asked for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("--seconds", type=float, default=60.0, help="of schedules, after the start")
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--all-reduce", default="nccl")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--emulated", action="store_true", help="GPUs that are CPU processes")
    args = parser.parse_args()
    global PATIENCE
    if args.emulated:
        PATIENCE *= 20
        os.environ["EMULATED"] = "1"
        from tests.kernels.emulated import install as emulate

        emulate()
    from twolane.results.provenance import provenance, save

    faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(args, Path(folder))
    print(found, flush=True)
    if args.out:
        workload = {"ranks": args.ranks, "all_reduce": args.all_reduce}
        save(args.out, provenance(workload), {"figures": found})
    return int(found["wrong"] > 0)


def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serve schedule after schedule; what was counted."""
    from tests.gpu.delayed import install
    from tests.model.checkpoints import make_checkpoint, reference
    from tests.parity.judge import Judge
    from tests.parity.ranks import Ranks
    from twolane.lanes.cuda import ranks as ranks_module
    from twolane.lanes.settings import DeviceSettings
    from twolane.systems.registry import make_system

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4}
    path = make_checkpoint("qwen3", folder / "model", seed=1, layers=3, sizes=sizes)
    judge = Judge(reference(path))
    install(0)
    ranks_module.FOLLOWER = "tests.gpu.delayed_follower"
    settings = DeviceSettings(
        model=str(path),
        dtype="float32",
        device="cuda",
        max_positions=64 if args.emulated else 256,
        levels=None if args.emulated else (16, 48),
        tensor_parallel_size=args.ranks,
        all_reduce=args.all_reduce,
        gpu_memory_utilization=0.3,
    )
    begun = time.monotonic()
    page = 16
    machine = ranks_module.RankedMachine(settings, lambda *_: None)
    ranks = Ranks(machine, 14, page, 6)
    print(f"started in {time.monotonic() - begun:.1f} s", flush=True)
    submits = requests()
    said = ranks.serve(make_system("static-split", {}), submits).outputs
    greedy = [i for i, submit in enumerate(submits) if submit.id in JUDGED]
    first = sum(judge.forgiven(submits[i].prompt, said[i]) for i in greedy)
    counted = {"schedules": 0, "tokens": 0, "forgiven": first, "wrong": 0, "side_by_side": 0}
    begun = told = time.monotonic()
    while time.monotonic() - begun < args.seconds and counted["schedules"] < args.schedules:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        served = ranks.serve(restless(counted["schedules"]), submits)
        counted["schedules"] += 1
        counted["tokens"] += sum(map(len, served.outputs))
        counted["side_by_side"] += served.side_by_side
        for i, (submit, output) in enumerate(zip(submits, served.outputs, strict=True)):
            if output == said[i]:
                continue
            print(f"schedule {counted['schedules']}, {submit.id}: {output}, {said[i]}", flush=True)
            try:
                counted["forgiven"] += judge.forgiven(submit.prompt, output)
            except AssertionError as error:
                counted["wrong"] += 1
                print(error, flush=True)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            print(f"{told - begun:.0f} s: {counted}", flush=True)
    took = time.monotonic() - begun
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    ranks.close()
    codes = [process.returncode for process in ranks.processes]
    return {**counted, "seconds": round(took, 1), "exit_codes": codes}


def requests() -> list[Any]:
    """Two share a prefix, one is sampled, and together they outgrow the pool."""
    from twolane.engine.messages import Submit
    from twolane.sampling import SamplingParams

    def ask(name: str, prompt: list[int], tokens: int, **params: Any) -> Submit:
        params = {"temperature": 0.0, **params}
        return Submit(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, **params))

    text = [(7 * i) % 250 + 3 for i in range(48)]
    return [
        ask("a", text[:40], 6),
        ask("b", [5, 9, 3, 7, 1, 8, 2], 8),
        ask("c", [*text[:32], 11, 12], 5),
        ask("d", [11, 12], 4, repetition_penalty=1.3),
        ask("e", [*range(100, 145)], 3),
        ask("f", [21, 22, 23], 8, temperature=1.0, seed=3),
        ask("g", [31] * 17, 7),
    ]


def restless(seed: int) -> Any:
    """Random plans; those that launch nothing are followed by others."""
    from msgspec.structs import replace

    from tests.engine.random_plans import RandomPlans
    from twolane.systems.plan import Plan
    from twolane.systems.view import View

    class Restless(RandomPlans):
        def plan(self, view: View, memory: int) -> tuple[Plan, int]:
            made, memory = super().plan(view, memory)
            return replace(made, wake_at=view.now + 0.0005), memory

    return Restless(seed)


if __name__ == "__main__":
    sys.exit(main())
