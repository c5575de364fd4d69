"""What a token costs a fleet's address: `python -m tests.fleet.costs [--streams 256]`.

A stand-in for a server streams an event of the usual size to every request each step; the fleet in
front of it, in a process of its own, is the real one. The time is its processor's.
"""

import argparse
import asyncio
import subprocess
import sys
import time

from tests.fleet.scripted import STREAM, Scripted, chunk
from twolane.fleet import run
from twolane.fleet.hosts import ReplicaAddress
from twolane.fleet.options import FleetOptions
from twolane.server.options import ServerOptions

EVENT = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[' + (
    b'{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)


class There:
    """The host of a server that runs already."""

    def __init__(self, url: str) -> None:
        self._address = ReplicaAddress(url, 0)

    async def start(self, name: str) -> ReplicaAddress:
        return self._address

    async def alive(self, name: str) -> bool:
        return True

    async def stop(self, name: str, patience: float) -> None: ...

    async def close(self) -> None: ...


async def measured(streams: int, seconds: float, step: float) -> float:
    """Return the microseconds of the fleet's CPU time for a token."""
    ends, tokens = asyncio.Event(), 0

    async def stream(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while not ends.is_set():
            writer.write(chunk(EVENT))
            await asyncio.sleep(step)

    async def read(port: int) -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(
            f"{head}Content-Length: 29\r\n\r\n".encode() + b'{"model": "m", "prompt": [1]}'
        )
        while data := await reader.read(1 << 16):
            tokens += data.count(b"data: ")
        writer.close()

    replica = await asyncio.start_server(Scripted(stream).serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{replica.sockets[0].getsockname()[1]}"
    words = [sys.executable, "-m", "tests.fleet.costs", "--of", url]
    fleet = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    assert fleet.stdout is not None
    try:
        port = int((await fleet.stdout.readline()).split(b" | ")[1].rsplit(b":", 1)[1])
        readers = [asyncio.create_task(read(port)) for _ in range(streams)]
        while tokens < 4 * streams:
            await asyncio.sleep(0.05)
        before, begun, clock = tokens, time.clock_gettime(~fleet.pid << 3 | 2), time.monotonic()
        while time.monotonic() < clock + seconds:
            await asyncio.sleep(0.05)
        spent, made = time.clock_gettime(~fleet.pid << 3 | 2) - begun, tokens - before
        ends.set()
        for reader in readers:
            reader.cancel()
        return 1e6 * spent / made
    finally:
        fleet.kill()
        await fleet.wait()


def main() -> None:
    """Measure and print, or be the fleet that is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step", type=float, default=0.1, help="seconds")
    parser.add_argument("--of", help="URL of the server, in the process of the fleet")
    given = parser.parse_args()
    if given.of is None:
        spent = asyncio.run(measured(given.streams, given.seconds, given.step))
        print(
            f"{given.streams} streams: {spent:.1f} us of the fleet's CPU time a token", flush=True
        )
        return
    run.hosts_of = lambda *_: There(given.of)  # type: ignore[assignment]
    alone = FleetOptions(port=0, replicas=1, hosts="local")
    sys.exit(run.serve_fleet(["m"], alone, ServerOptions()))


if __name__ == "__main__":
    main()
