"""Cost of delivering a token from the engine to the client: `python benchmarks/delivery.py`.

No model: a stand-in for the engine process makes every stream a token at the same moment, each
`--step-ms`, and finds it when an engine that launches meanwhile does. The server in front of it is
the real one. Whatever the gaps between tokens, as `twolane bench serve` sees them, differ from a
step was added on the way by the API process or the client. Needs no GPU, and a machine that does
nothing else.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import zmq
from measured import cpu_seconds

from twolane.engine.config import EngineConfig, EngineStart
from twolane.engine.messages import (
    Abort,
    Output,
    Outputs,
    Ready,
    Stats,
    Submit,
    Times,
    decode_to_engine,
    encode,
)
from twolane.frontend.engine_client import EngineClient
from twolane.results.provenance import provenance, save
from twolane.server.options import ServerOptions
from twolane.server.run import serve

MODEL = "qwen3-8b"
"""Shape whose name and context the stand-in serves."""
TTFT = 0.15
"""Seconds until a request's first token, with the next tokens of all."""
FOUND_SECONDS = 0.00035, 0.0002
"""Least and mean additional seconds (exponential) until the end of a step is found: 0.5 ms
(median), 1.3 (P99), as beside prefill on an H200."""
ENGINE, SERVER = "--engine", "--server"
LOAD = ("--dataset", "azure-conv", "--max-input-len", "12000", "--num-warmups", "8")
"""Load as options of `twolane bench serve`."""
READY = Ready(
    system="stand-in",
    device="nothing",
    units=1,
    levels=[],
    max_model_len=20_000,
    kv_tokens=1_000_000,
    page_size=16,
    vocab_size=100_000,
    eos_token_ids=[],
)


def main() -> None:
    """Measure, print, write the file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=14.0, help="requests a second")
    parser.add_argument("--prompts", type=int, default=400, help="requests of a run")
    parser.add_argument("--step-ms", type=float, default=7.5, help="between two tokens")
    parser.add_argument("--playout-ms", type=float, nargs="+", default=[0, 2], help="in turns")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    given = parser.parse_args()
    runs = []
    for _ in range(given.rounds):
        for playout_ms in given.playout_ms:
            runs.append(measure(given.rate, given.prompts, given.step_ms, playout_ms))
            print(msgspec.json.encode(runs[-1]).decode(), flush=True)
    if given.out is not None:
        workload = {"load": LOAD, "rate": given.rate, "prompts": given.prompts}
        save(given.out, provenance({**workload, "step_ms": given.step_ms}), {"runs": runs})


def measure(rate: float, prompts: int, step_ms: float, playout_ms: float) -> dict[str, object]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as folder, served(step_ms, playout_ms) as server:
        result = Path(folder) / "result.json"
        before = cpu_seconds(server.process.pid)
        load(server.url, rate, prompts, result)
        seconds = cpu_seconds(server.process.pid) - before
        saved = msgspec.json.decode(result.read_bytes())
    gaps = 1e3 * np.concatenate([each for each in saved["itls"] if each])
    p50, p90, p99 = np.percentile(gaps, (50, 90, 99)).tolist()
    too_long = {more: 100 * float(np.mean(gaps > step_ms + more)) for more in (0.5, 1.0)}
    return {
        "playout_ms": playout_ms,
        "tokens": saved["total_output_tokens"],
        "most_streams": saved["max_concurrent_requests"],
        "api_cpu_us_per_token": 1e6 * seconds / saved["total_output_tokens"],
        "tbt_ms": {"p50": p50, "p90": p90, "p99": p99},
        "percent_too_long_by_ms": too_long,
    }


class Served(msgspec.Struct):
    """A server in front of the stand-in."""

    process: subprocess.Popen[str]
    url: str


@contextlib.contextmanager
def served(step_ms: float, playout_ms: float) -> Iterator[Served]:
    """Run the server within the block."""
    command = [sys.executable, __file__, SERVER, f"{step_ms:g}", f"{playout_ms:g}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announcement = process.stdout.readline()
            if not announcement:
                raise SystemExit(f"the server ended with {process.wait()}")
            yield Served(process, announcement.split(" | ")[1])
        finally:
            process.terminate()


def load(url: str, rate: float, prompts: int, result: Path) -> None:
    """Run `twolane bench serve`."""
    own = ["--request-rate", f"{rate:g}", "--num-prompts", f"{prompts}"]
    command = [sys.executable, "-m", "twolane", "bench", "serve", "--base-url", url, *LOAD, *own]
    command += ["--result-file", str(result)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Engine:
    """A stand-in engine: a token for every request each `step_ms`, due `playout_ms` later or at
    once."""

    def __init__(self, start: EngineStart, step_ms: float, playout_ms: float) -> None:
        context = zmq.Context.instance()
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._inbox.connect(start.to_engine)
        self._outbox.connect(start.from_engine)
        self._poller = zmq.Poller()
        for source in (self._inbox, sys.stdin.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._step, self._playout = step_ms / 1e3, playout_ms / 1e3
        self._random = random.Random(0)
        self._waiting: dict[str, tuple[float, int]] = {}
        self._left: dict[str, int] = {}
        """Remaining tokens by request."""

    def run(self) -> None:
        """Run until the API process is gone."""
        self._outbox.send(encode(READY))
        made = time.monotonic()
        least, more = FOUND_SECONDS
        while True:
            made += self._step
            found = made + least + self._random.expovariate(1 / more)
            while (left := found - time.monotonic()) > 0:
                ready = dict(self._poller.poll(1e3 * left))
                if sys.stdin.fileno() in ready:
                    return
                if self._inbox in ready:
                    self._take()
            self._tell(made)

    def _take(self) -> None:
        message = decode_to_engine(self._inbox.recv())
        if isinstance(message, Submit):
            tokens = message.params.max_tokens or 1
            self._waiting[message.id] = time.monotonic() + TTFT, tokens
        elif isinstance(message, Abort):
            self._left.pop(message.id, None)

    def _tell(self, made: float) -> None:
        due = made + self._playout if self._playout else None
        for id, (begins, tokens) in list(self._waiting.items()):
            if begins <= made:
                del self._waiting[id]
                self._left[id] = tokens
        outputs = []
        for id in list(self._left):
            self._left[id] -= 1
            ended = self._left[id] == 0
            if ended:
                del self._left[id]
            times = Times() if ended else None
            outputs.append(Output(id, [17], "length" if ended else None, times=times, due=due))
        if outputs:
            self._outbox.send(encode(Outputs(outputs, [], Stats(running=len(self._left)))))


if __name__ == "__main__":
    mode, *step_and_playout = sys.argv[1:] or [""]
    if mode == ENGINE:
        told = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
        Engine(told, *map(float, step_and_playout)).run()
    elif mode == SERVER:
        EngineClient.arguments = (str(Path(__file__).resolve()), ENGINE, *step_and_playout)
        config = EngineConfig(model=MODEL, load_format="dummy", max_model_len=READY.max_model_len)
        options = ServerOptions(port=0, max_queue=10_000, drain_seconds=0.0, log_level="warning")
        sys.exit(serve(config, options))
    else:
        main()
