"""A server of several ranks over HTTP: `python -m tests.gpu.serve_ranks 2 --lose SIGKILL`.

Asks through the openai client, holds the tokens against transformers, reads metrics, and then loses
a rank while answers are streamed: the server must end, say why, and give the memory back.
TWOLANE_TEST_SERVE="--device cuda" has it run on GPUs.
"""

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.hardening.kills import of_server
from tests.model.checkpoints import VOCAB, make_checkpoint, reference
from tests.parity.judge import Judge
from tests.parity.prompts import random_requests
from tests.server.serving import Served, alive, serving

ASKED, TOGETHER = 24, 8
ENDS_WITHIN = 15.0
"""Seconds from the loss of a rank to the server's end: ten to notice it, and the drain."""
ARGUMENTS = ("--dtype", "float32", "--kv-tokens", "32768", "--drain-seconds", "2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("--lose", default="SIGKILL", choices=("SIGKILL", "SIGSTOP"))
    parser.add_argument("--seconds", type=float, default=100.0, help="after which it is a hang")
    parser.add_argument("--out", type=Path)
    args, more = parser.parse_known_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_key_value_heads": 4, "max_position_embeddings": 4096}
        path = make_checkpoint("qwen3", Path(folder) / "model", seed=1, sizes=sizes)
        before, begun, log = used_memory(), time.monotonic(), Path(folder) / "log"
        arguments = (*ARGUMENTS, "--tensor-parallel-size", str(args.ranks), *more)
        with serving(str(path), *arguments, stderr=log) as served:
            note(found, start_s=round(time.monotonic() - begun, 1), memory_mib=used_memory())
            tokens, forgiven = answers(served, Judge(reference(path)))
            note(found, tokens=tokens, forgiven=forgiven)
            metrics = served.metrics()
            note(found, metrics={name: metrics[name] for name in ASKED_METRICS if name in metrics})
            lost(served, args.lose, found)
        said = log.read_text().splitlines()
        note(found, said=[line for line in said if "rank" in line][-3:])
        time.sleep(1.0)
        note(found, memory_mib_before=before, memory_mib_after=used_memory())
    if args.out:
        from twolane.results.provenance import provenance, save

        workload = {"ranks": args.ranks, "lose": args.lose}
        save(args.out, provenance(workload), {"figures": found})
    held = found["ended_s"] <= ENDS_WITHIN and not found["left_over"] and found["said"]
    return 0 if held and found["memory_mib_after"] == before else 1


ASKED_METRICS = ("generation_tokens_total", "request_success_total", "prompt_tokens_total")


def note(found: dict[str, Any], **values: Any) -> None:
    """Keep figures, and print them as they come."""
    found.update(values)
    print(*(f"{name} {value}" for name, value in values.items()), flush=True)


def answers(served: Served, judge: Judge) -> tuple[int, int]:
    """Ask by the openai client, several at a time; tokens compared, and those forgiven."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{served.base}/v1", api_key="none", timeout=60.0, max_retries=0)
    model = client.models.list().data[0].id

    def ask(prompt: list[int], count: int) -> list[int]:
        answer = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=count,
            temperature=0.0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]

    asked = random_requests(VOCAB)[:ASKED]
    with ThreadPoolExecutor(TOGETHER) as threads:
        said = list(threads.map(lambda one: ask(one.prompt, one.params.max_tokens or 1), asked))
    pairs = zip(asked, said, strict=True)
    return sum(map(len, said)), sum(judge.forgiven(one.prompt, output) for one, output in pairs)


def lost(served: Served, by: str, found: dict[str, Any]) -> None:
    """Lose rank 1 while answers are streamed, and wait for the server's end."""
    pids = of_server(served)
    del pids["server"]
    bodies = [{"prompt": [3 + i], "max_tokens": 4000, "ignore_eos": True} for i in range(TOGETHER)]
    told: list[Any] = []

    def stream(body: dict[str, Any]) -> None:
        try:
            told.append(served.request("/v1/completions", {**body, "stream": True})[2])
        except OSError as error:
            told.append(error)

    threads = [threading.Thread(target=stream, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    running = time.monotonic() + 20.0
    while served.request("/load")[2]["running"] < TOGETHER and time.monotonic() < running:
        time.sleep(0.05)
    begun = time.monotonic()
    os.kill(pids["rank 1"], getattr(signal, by))
    try:
        code: int | None = served.process.wait(3 * ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        code = None
    note(found, ended_s=round(time.monotonic() - begun, 2), exit_code=code)
    for thread in threads:
        thread.join(5.0)
    time.sleep(1.0)
    note(
        found, streams_told=len(told), left_over=[role for role, pid in pids.items() if alive(pid)]
    )


def used_memory() -> list[int]:
    """MiB in use on each visible GPU; empty where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shown := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", shown]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in ran.stdout.split()]


if __name__ == "__main__":
    sys.exit(main())
