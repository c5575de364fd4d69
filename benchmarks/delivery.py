"""What a token's way from the engine to the client costs: `python benchmarks/delivery.py`.

No model: a stand-in for the engine makes every stream a token at the same moment, each `--step-ms`,
and finds it when an engine that launches meanwhile does. Whatever the gaps between tokens, as
`twolane bench serve` sees them, differ from a step is the way's: the engine's, the front's and the
client's. Needs no GPU, and a machine that does nothing else.
"""

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq
from origin import origin, save

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
from twolane.frontend.text.codec import TextCodec
from twolane.server.run import ServerOptions, Stop, bind, serve_until_stopped
from twolane.server.service import Service

MODEL, CONTEXT = "stand-in", 20_000
TTFT = 0.15
"""Seconds until a request's first token, with the next tokens of all."""
FOUND_SECONDS = 0.00035, 0.0002
"""After its end a step is found so long later at least, and more by this on average (exponential):
0.5 ms (median), 1.3 (P99), as beside prefill on an H200."""
ENGINE, FRONT = "--engine", "--front"
READY = Ready(
    system="stand-in",
    device="nothing",
    units=1,
    levels=[],
    max_model_len=CONTEXT,
    kv_tokens=1_000_000,
    vocab_size=100_000,
    eos_token_ids=[],
)


class StandIn(EngineClient):
    """Has this file for an engine."""

    arguments = str(Path(__file__).resolve()), ENGINE


def main() -> None:
    """Measure, print, write the file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=14.0, help="requests a second")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=7.5)
    parser.add_argument("--playout-ms", type=float, nargs="+", default=[0, 2], help="in turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs = []
    for _ in range(given.rounds):
        for playout_ms in given.playout_ms:
            runs.append(measure(given.rate, given.prompts, given.step_ms, playout_ms))
            print(msgspec.json.encode(runs[-1]).decode())
    if given.out is not None:
        save(given.out, {**origin(), "runs": runs})


def measure(rate: float, prompts: int, step_ms: float, playout_ms: float) -> dict[str, object]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        front_seconds = run(rate, prompts, (f"{step_ms:g}", f"{playout_ms:g}"), result)
        saved = msgspec.json.decode(result.read_bytes())
    gaps = 1e3 * np.concatenate([each for each in saved["itls"] if each])
    p50, p90, p99 = np.percentile(gaps, (50, 90, 99)).tolist()
    too_long = {more: 100 * float(np.mean(gaps > step_ms + more)) for more in (0.5, 1.0)}
    return {
        "playout_ms": playout_ms,
        "tokens": saved["total_output_tokens"],
        "most_streams": saved["max_concurrent_requests"],
        "front_cpu_us_per_token": 1e6 * front_seconds / saved["total_output_tokens"],
        "tbt_ms": {"p50": p50, "p90": p90, "p99": p99},
        "percent_too_long_by_ms": too_long,
    }


def run(rate: float, prompts: int, stand_in: Sequence[str], result: Path) -> float:
    """The front's CPU seconds for a run of `twolane bench serve`."""
    front = subprocess.Popen(
        [sys.executable, __file__, FRONT, *stand_in], stdout=subprocess.PIPE, text=True
    )
    assert front.stdout is not None
    try:
        url = front.stdout.readline().split(" | ")[1]
        subprocess.run(
            [
                *(sys.executable, "-m", "twolane", "bench", "serve", "--base-url", url),
                *("--dataset", "azure-conv", "--max-input-len", "12000"),
                *("--request-rate", f"{rate:g}", "--num-prompts", f"{prompts}"),
                *("--num-warmups", "8", "--result-file", str(result)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    finally:
        front.send_signal(signal.SIGTERM)
        seconds = front.communicate()[0]
    return float(seconds)


async def serve(stand_in: Sequence[str]) -> None:
    """Be the front; print where, and at the end the CPU seconds since then."""
    StandIn.arguments = (*StandIn.arguments, *stand_in)
    engine = await StandIn.start(EngineConfig(model=MODEL))
    service = Service(engine, TextCodec(None), MODEL, max_queue=10_000)
    with bind("127.0.0.1", 0) as listener:
        begun = time.process_time()
        await serve_until_stopped(service, listener, Stop(), ServerOptions(drain_seconds=0.0))
    print(time.process_time() - begun)
    service.close()
    await engine.close()


class Engine:
    """A token for everybody, each `step_ms`, handed on `playout_ms` later, or when it is there."""

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
        """Tokens to come, by request."""

    def run(self) -> None:
        """Until the front is gone."""
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
    if sys.argv[1:2] == [ENGINE]:
        told = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
        Engine(told, *map(float, sys.argv[2:])).run()
    elif sys.argv[1:2] == [FRONT]:
        asyncio.run(serve(sys.argv[2:]))
    else:
        main()
