"""What a token's way from the engine to the client costs: `python benchmarks/delivery.py`.

No model: a stand-in for the engine sends every stream a token at the same moment, each `--step-ms`.
Whatever the gaps between tokens, as `twolane bench serve` sees them, differ from that is the way's:
the front's and the client's. Needs no GPU, and a machine that does nothing else.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import zmq
from origin import origin, save

from twolane.api.engine_client import EngineClient
from twolane.api.run import ServerOptions, Stop, bind, serve_until_stopped
from twolane.api.service import Service
from twolane.api.text import TextCodec
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

MODEL, CONTEXT = "stand-in", 20_000
TTFT = 0.15
"""Seconds until a request's first token, with the next tokens of all."""
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
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        front_seconds = run(given.rate, given.prompts, given.step_ms, result)
        saved = msgspec.json.decode(result.read_bytes())
    gaps = 1e3 * np.concatenate([each for each in saved["itls"] if each])
    p50, p90, p99 = np.percentile(gaps, (50, 90, 99)).tolist()
    figures = {
        "tokens": saved["total_output_tokens"],
        "most_streams": saved["max_concurrent_requests"],
        "front_cpu_us_per_token": 1e6 * front_seconds / saved["total_output_tokens"],
        "tbt_ms": {"p50": p50, "p90": p90, "p99": p99},
        "percent_1_ms_too_long": 100 * float(np.mean(gaps > given.step_ms + 1.0)),
    }
    print(msgspec.json.format(msgspec.json.encode(figures)).decode())
    if given.out is not None:
        save(given.out, {**origin(), **figures})


def run(rate: float, prompts: int, step_ms: float, result: Path) -> float:
    """The front's CPU seconds for a run of `twolane bench serve`."""
    front = subprocess.Popen(
        [sys.executable, __file__, FRONT, f"{step_ms:g}"], stdout=subprocess.PIPE, text=True
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
        )
    finally:
        front.send_signal(signal.SIGTERM)
        seconds = front.communicate()[0]
    return float(seconds)


async def serve(step_ms: float) -> None:
    """Be the front; print where, and at the end the CPU seconds since then."""
    StandIn.arguments = (*StandIn.arguments, f"{step_ms:g}")
    engine = await StandIn.start(EngineConfig(model=MODEL))
    service = Service(engine, TextCodec(None), MODEL, max_queue=10_000)
    with bind("127.0.0.1", 0) as listener:
        begun = time.process_time()
        await serve_until_stopped(service, listener, Stop(), ServerOptions(drain_seconds=0.0))
    print(time.process_time() - begun)
    service.close()
    await engine.close()


class Engine:
    """A token for everybody, each `step_ms`."""

    def __init__(self, start: EngineStart, step_ms: float) -> None:
        context = zmq.Context.instance()
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._inbox.connect(start.to_engine)
        self._outbox.connect(start.from_engine)
        self._poller = zmq.Poller()
        for source in (self._inbox, sys.stdin.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._step = step_ms / 1e3
        self._waiting: dict[str, tuple[float, int]] = {}
        self._left: dict[str, int] = {}
        """Tokens to come, by request."""

    def run(self) -> None:
        """Until the front is gone."""
        self._outbox.send(encode(READY))
        due = time.monotonic()
        while True:
            due += self._step
            while (left := due - time.monotonic()) > 0:
                ready = dict(self._poller.poll(1e3 * left))
                if sys.stdin.fileno() in ready:
                    return
                if self._inbox in ready:
                    self._take()
            self._tell()

    def _take(self) -> None:
        message = decode_to_engine(self._inbox.recv())
        if isinstance(message, Submit):
            tokens = message.params.max_tokens or 1
            self._waiting[message.id] = time.monotonic() + TTFT, tokens
        elif isinstance(message, Abort):
            self._left.pop(message.id, None)

    def _tell(self) -> None:
        now = time.monotonic()
        for id, (begins, tokens) in list(self._waiting.items()):
            if begins <= now:
                del self._waiting[id]
                self._left[id] = tokens
        outputs = []
        for id in list(self._left):
            self._left[id] -= 1
            ended = self._left[id] == 0
            if ended:
                del self._left[id]
            times = Times() if ended else None
            outputs.append(Output(id, [17], "length" if ended else None, times=times))
        if outputs:
            self._outbox.send(encode(Outputs(outputs, [], Stats(running=len(self._left)))))


if __name__ == "__main__":
    if sys.argv[1:2] == [ENGINE]:
        told = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
        Engine(told, float(sys.argv[2])).run()
    elif sys.argv[1:2] == [FRONT]:
        asyncio.run(serve(float(sys.argv[2])))
    else:
        main()
