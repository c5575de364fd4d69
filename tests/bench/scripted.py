"""A third-party server that follows a script, on a real socket and a clock of its own.

A script is a list of steps. Before each step the clock is set to its time; after it the server
gives the client the event loop until the bytes have certainly been read. So what the client
measures is known exactly, however slow the machine is.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable

from aiohttp import web

from twolane.bench.serve import run
from twolane.results.record import Record
from twolane.results.result import BenchConfig, Result
from twolane.workload.spec import WorkloadSpec


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def event(payload) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish}]})


def delta(finish: str | None = None, **fields) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return event({"choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"
BREAK = object()
"""Step: cut the connection."""
STALL = object()
"""Step: say nothing more."""
EXPIRE = object()
"""Step: put the event loop's own clock an hour forward, so that every timeout is over."""


class ScriptedServer:
    """`script(number, body)` gives the steps [(seconds, bytes | BREAK | STALL)] of a request,
    seconds after the start of the run, or (status, text) to refuse it."""

    def __init__(self, script: Callable) -> None:
        self.script = script
        self.clock = Clock()
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.stalled = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        steps = self.script(number, self.bodies[-1])
        if isinstance(steps, tuple):
            status, message = steps
            return web.json_response({"error": {"message": message}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at, step in steps:
            self.clock.now = 1000.0 + at
            if step is STALL:
                self.stalled.set()
                await asyncio.Event().wait()
            if step is EXPIRE:
                expire_timeouts()
                continue
            if step is BREAK:
                request.transport.abort()
                return response
            await response.write(step)
            await settle()
        await response.write_eof()
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted-model"}]})

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application(client_max_size=1 << 26)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self.answer)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await runner.cleanup()


async def settle() -> None:
    """Give way until the client, in the same event loop, has read what was written."""
    for _ in range(20):
        await asyncio.sleep(0.0005)


def expire_timeouts() -> None:
    """Put the running event loop's clock forward: what waits for less is over, now and not sooner,
    however slow the machine is."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + 3600


def bench(
    script: Callable,
    *,
    spec=None,
    stop_when_stalled=False,
    on_record: Callable[[Record], None] = lambda record: None,
    **config,
):
    """Run the benchmark against a scripted server, one request at a time unless told."""

    async def main() -> tuple[Result, ScriptedServer]:
        server = ScriptedServer(script)
        workload = WorkloadSpec(**{"num_prompts": 1, "random_input_len": 4, **(spec or {})})
        stop = asyncio.Event()
        async with server.serving() as url:
            settings = {"max_concurrency": 1, "timeout": 30.0, **config}
            whole = BenchConfig(base_url=url, workload=workload, **settings)
            one = run(whole, stop=stop, clock=server.clock, on_record=on_record)
            running = asyncio.create_task(one)
            if stop_when_stalled:
                await server.stalled.wait()
                stop.set()
            return await running, server

    return asyncio.run(main())
