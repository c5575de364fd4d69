"""Cost of delivering a token from the engine to the client: `python benchmarks/delivery.py`.

A stand-in for the engine process makes every stream a token each `--step-ms`; the server in front
of it is the real one. What a client's gaps differ from a step was added on the way. Needs no GPU.

The client has a core of its own, as one on another machine has: Linux wakes it on the core of the
server that writes to it, and each token would cost two switches between them.
"""

import argparse
import contextlib
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import zmq
from measured import api_cpu_seconds

from twolane.common.resources import allowed_cores, pin_thread
from twolane.engine import messages
from twolane.engine.config import EngineConfig, EngineStart
from twolane.engine.messages import Output, Submit, TokenLogprobs
from twolane.frontend.engine_client import EngineClient
from twolane.results.provenance import provenance, save
from twolane.server.options import ServerOptions
from twolane.server.run import serve

MODEL = "qwen3-8b"
"""Shape whose name the stand-in serves, without a tokenizer, unless told."""
ENGINE, SERVER = "--engine", "--server"
ENGINES = ENGINE, "twolane.engine"
READY = messages.Ready("stand-in", "nothing", 1, [], 20_000, 10_000_000, 16, 49_152, [])
TOKENS = range(1_000, 5_000)
"""Tokens of which the stand-in makes its answers."""
BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "completion": ("completions", {"prompt": [7] * 64}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hello."}]}),
    "logprobs": ("completions", {"prompt": [7] * 64, "logprobs": 2}),
    "stops": ("completions", {"prompt": [7] * 64, "stop": ["\n\nUser:", "###"]}),
}
"""Path and body of the requests of each kind of stream."""


def main() -> None:
    """Measure, print, write the file if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="whose tokenizer is used, if any")
    parser.add_argument("--real", action="store_true", help="the model's engine, with new weights")
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--kind", choices=BODIES, default="completion", help="of all")
    parser.add_argument("--seconds", type=float, default=8.0, help="for which streams are read")
    parser.add_argument("--step-ms", type=float, default=7.5, help="between two tokens")
    parser.add_argument("--playout-ms", type=float, nargs="+", default=[0, 2], help="in turns")
    parser.add_argument("--beside", type=int, default=0, help="busy processes beside the server")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    given = parser.parse_args()
    runs, cores = [], allowed_cores()
    for playout_ms in given.playout_ms * given.rounds:
        with served(given, playout_ms, cores) as (pid, url):
            figures = read(pid, connect(url, given), given.seconds)
        runs.append({"playout_ms": playout_ms, **figures})
        print(msgspec.json.encode(runs[-1]).decode(), flush=True)
    if given.out is not None:
        workload = {name: value for name, value in vars(given).items() if name != "out"}
        save(given.out, provenance(workload), {"runs": runs})


@contextlib.contextmanager
def served(
    given: argparse.Namespace, playout_ms: float, cores: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Run the server, and busy processes beside it, within the block; yield its id and its URL.
    This process has the last core alone, unless a model's engine needs it, too."""
    apart = len(cores) > 1 + given.real
    pin_thread(cores[:-1] if apart else cores)
    words = f"{given.step_ms:g}", f"{playout_ms:g}", *(["real"] if given.real else [])
    command = [sys.executable, __file__, SERVER, given.model, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as own:
        spin = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(spin) for _ in range(given.beside)]
        try:
            assert own.stdout is not None
            announcement = own.stdout.readline()
            if not announcement:
                raise SystemExit(f"the server ended with {own.wait()}")
            pin_thread(cores[-1:] if apart else cores)
            yield own.pid, announcement.split(" | ")[1]
        finally:
            for each in (*busy, own):
                each.terminate()


def connect(url: str, given: argparse.Namespace) -> dict[int, socket.socket]:
    """Ask for all streams; return their sockets by descriptor."""
    host, _, port = urlsplit(url).netloc.partition(":")
    path, body = BODIES[given.kind]
    own = {"model": given.model, "max_tokens": 19_000, "stream": True, "ignore_eos": True}
    data = msgspec.json.encode({**body, **own})
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sockets = [socket.create_connection((host, int(port))) for _ in range(given.streams)]
    for each in sockets:
        each.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return {each.fileno(): each for each in sockets}


def read(pid: int, sockets: dict[int, socket.socket], seconds: float) -> dict[str, object]:
    """Read streams, and do nothing with them but look at the clock; return the figures of the
    seconds from when every one had tokens."""
    poll = select.epoll()
    for file in sockets:
        poll.register(file, select.EPOLLIN)
    last: dict[int, float] = {}
    gaps: list[float] = []
    tokens, buffer, until, cpu = 0, memoryview(bytearray(1 << 20)), 0.0, (0.0, 0.0)
    while not until or time.perf_counter() < until:
        for file, _ in poll.poll():
            data = bytes(buffer[: sockets[file].recv_into(buffer)])
            now, found = time.perf_counter(), data.count(b"data: ")
            if until:
                tokens += found
                gaps.append(now - last[file])
            last[file] = now
            if not found and b"HTTP/1.1 200" not in data:
                raise SystemExit(data.decode())
        if not until and len(last) == len(sockets):
            until, cpu = time.perf_counter() + seconds, api_cpu_seconds(pid, *ENGINES)
    spent = zip(cpu, api_cpu_seconds(pid, *ENGINES), strict=True)
    own, every = (1e6 * (after - before) / tokens for before, after in spent)
    percentiles = zip((50, 90, 99), np.percentile(1e3 * np.array(gaps), (50, 90, 99)), strict=True)
    return {
        **{"tokens": tokens, "api_cpu_us_per_token": own, "all_api_cpu_us_per_token": every},
        "tbt_ms": {f"p{percent}": float(gap) for percent, gap in percentiles},
    }


class Engine:
    """A stand-in engine: a token for every request each `step_ms`, due `playout_ms` later, evenly
    over a step, or at once."""

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
        self._left: dict[str, int] = {}
        """Remaining tokens by request."""
        self._scored: dict[str, bool] = {}
        """Whether a request asks for log-probabilities."""

    def run(self) -> None:
        """Run until the API process is gone."""
        self._outbox.send(messages.encode(READY))
        made = time.monotonic()
        while True:
            made += self._step
            while (left := made - time.monotonic()) > 0:
                ready = dict(self._poller.poll(1e3 * left))
                if sys.stdin.fileno() in ready:
                    return
                if self._inbox in ready:
                    self._take()
            self._tell(made)

    def _take(self) -> None:
        message = messages.decode_to_engine(self._inbox.recv())
        if isinstance(message, Submit):
            self._left[message.id] = message.params.max_tokens or 1
            self._scored[message.id] = message.params.logprobs is not None
        elif isinstance(message, messages.Abort):
            self._left.pop(message.id, None)

    def _tell(self, made: float) -> None:
        outputs, each = [], self._step / max(1, len(self._left))
        for place, id in enumerate(list(self._left)):
            self._left[id] -= 1
            ended = self._left[id] == 0
            if ended:
                del self._left[id]
            token, other = self._random.sample(TOKENS, 2)
            score = TokenLogprobs(token, -1.0, 1, [(token, -1.0), (other, -1.5)])
            due = made + self._playout + place * each if self._playout else None
            output = Output(id, [token], "length" if ended else None, due=due)
            scores = [score] if self._scored[id] else None
            times = messages.Times() if ended else None
            outputs.append(msgspec.structs.replace(output, logprobs=scores, times=times))
        if outputs:
            self._outbox.send(
                messages.encode(
                    messages.Outputs(outputs, [], messages.Stats(running=len(self._left)))
                )
            )


if __name__ == "__main__":
    mode, *rest = sys.argv[1:] or [""]
    if mode == ENGINE:
        told = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineStart)
        Engine(told, *map(float, rest)).run()
    elif mode == SERVER:
        if not (real := rest[3:] == ["real"]):
            EngineClient.arguments = (str(Path(__file__).resolve()), ENGINE, *rest[1:])
        lengths = dict.fromkeys(("max_model_len", "max_positions"), READY.max_model_len)
        rows = {"max_running": 4096, "kv_tokens": 400_000} if real else {}
        format = "dummy" if real or rest[0] == MODEL else "auto"
        config = EngineConfig(model=rest[0], load_format=format, **lengths, **rows)
        options = ServerOptions(port=0, max_queue=10_000, drain_seconds=0.0, log_level="warning")
        sys.exit(serve(config, options))
    else:
        main()
