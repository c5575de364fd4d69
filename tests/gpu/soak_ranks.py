"""Random schedules over several GPUs with delays: `python -m tests.gpu.soak_ranks 2 --seconds 60`.

Every schedule must say what the first one says, which is held against transformers; tokens that
differ where the reference's two best lie close together are counted as forgiven.
"""

import argparse
import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
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
    parser.add_argument("--schedules", type=int, default=2000, help="at most")
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
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
    names = "ranks", "all_reduce", "first"
    about = provenance({name: getattr(args, name) for name in names})
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for found in soak(args, Path(folder)):
            print(found, flush=True)
            if args.out:
                save(args.out, about, {"figures": found})
    return int(found["wrong"] > 0)


def started(args: argparse.Namespace, path: Path) -> Any:
    """Ranks that are held up at random."""
    from tests.gpu.delayed import install
    from tests.parity.ranks import Ranks
    from twolane.devices import DeviceSettings
    from twolane.lanes import base
    from twolane.lanes.ranks import cuda_machine

    install(0)
    cuda_machine.FOLLOWER = "tests.gpu.delayed_follower"
    if not args.emulated:
        base.UNPREDICTED_SECONDS = base.LAUNCH_TIMEOUT_SECONDS
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
    begun, page = time.monotonic(), 16
    machine = cuda_machine.RankedCudaMachine(settings, lambda *_: None)
    ranks = Ranks(machine, 14, page, 6)
    print(f"started in {time.monotonic() - begun:.1f} s", flush=True)
    return ranks


def soak(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Serve schedule after schedule; what was counted, now and then and at the end."""
    from tests.model.checkpoints import make_checkpoint, reference
    from tests.parity.judge import Judge
    from twolane.parallel.group import RankLost
    from twolane.systems.registry import make_system

    # Rows that the kernel of joined sums serves in float32.
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = make_checkpoint("qwen3", folder / "model", seed=1, layers=3, sizes=sizes)
    judge, ranks = Judge(reference(path)), started(args, path)
    submits = requests()
    said = ranks.serve(make_system("static-split", {}), submits).outputs
    greedy = [i for i, submit in enumerate(submits) if submit.id in JUDGED]
    first = sum(judge.forgiven(submits[i].prompt, said[i]) for i in greedy)
    counted = {"schedules": 0, "tokens": 0, "forgiven": first, "wrong": 0, "side_by_side": 0}
    begun = told = time.monotonic()
    while time.monotonic() - begun < args.seconds and counted["schedules"] < args.schedules:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            served = ranks.serve(restless(args.first + counted["schedules"]), submits)
        except RankLost:
            print(f"lost in schedule {args.first + counted['schedules']}: {counted}", flush=True)
            ask_all(ranks.processes)
            os._exit(2)  # threads that wait for the GPUs never end
        counted["schedules"] += 1
        counted["tokens"] += sum(map(len, served.outputs))
        counted["side_by_side"] += served.side_by_side
        for submit, output, right in zip(submits, served.outputs, said, strict=True):
            if output != right:
                number = args.first + counted["schedules"] - 1
                print(f"schedule {number}, {submit.id}: {output}, {right}", flush=True)
                judged(judge, submit, output, counted)
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            yield {**counted, "seconds": round(told - begun, 1)}
    took = time.monotonic() - begun
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    codes = ranks.close()
    yield {**counted, "seconds": round(took, 1), "exit_codes": codes}


def judged(judge: Any, submit: Any, output: list[int], counted: dict[str, Any]) -> None:
    """Count tokens that differ from the first schedule's as forgiven, or as wrong."""
    try:
        counted["forgiven"] += judge.forgiven(submit.prompt, output)
    except AssertionError as error:
        counted["wrong"] += 1
        print(error, flush=True)


def ask_all(processes: list[Any]) -> None:
    """Have every rank tell where it stands."""
    for rank, process in enumerate(processes, start=1):
        print(f"rank {rank}:", file=sys.stderr, flush=True)
        process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
    print("rank 0:", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1.0)


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
    code = main()
    sys.stdout.flush()
    os._exit(code)  # nothing at the exit may wait for a GPU
