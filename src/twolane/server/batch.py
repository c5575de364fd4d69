"""Batch files: requests in OpenAI's format, answered without a listening server.

A line of the input is `{"custom_id", "method", "url", "body"}`, and one of the output is
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`. Lines are read as
strictly as bodies, and requests pass the same application as those of `twolane serve`.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import uuid
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message

from twolane.common.checked_json import Json
from twolane.engine.config import EngineConfig
from twolane.frontend.engine_client import EngineError
from twolane.frontend.progress import progress_bars
from twolane.frontend.startup import start_engine
from twolane.server.app import GENERATION_PATHS, create_app
from twolane.server.http import strict_json
from twolane.server.http.errors import ApiError
from twolane.server.options import ServerOptions
from twolane.server.run import check_adapter_names, service_of

log = logging.getLogger("twolane.server")

ANSWER_ID = "batch_req_"
"""How the id of each answer begins."""
ANSWER_BEGINS = f'{{"id":"{ANSWER_ID}'.encode()
"""How each line of the output begins."""
MAX_PIPED_LINE = 1 << 26
"""Bytes that a line of a pipe may have; two such lines are kept."""


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a batch file."""

    custom_id: str
    url: str
    body: Json
    method: str = "POST"

    @property
    def refusal(self) -> str | None:
        """Reason why the line cannot be answered; None: it can."""
        if self.method != "POST" or self.url not in GENERATION_PATHS:
            return f"url must be one of {', '.join(sorted(GENERATION_PATHS))}, with method POST"
        return "body.stream cannot be true in a batch" if self.body.get("stream") else None


class _Response(msgspec.Struct):
    """What says of an answer whether it is kept."""

    status_code: int


class _Answer(msgspec.Struct):
    """What a line of the output is known by."""

    id: str
    response: _Response | None


class Answered(NamedTuple):
    """The requests that an earlier run has answered.

    An answer's id is a digest of its line and of what the answer depends on besides it, so that an
    answer to another line, or by another model, is none.
    """

    settings: bytes = b""
    """What the answers depend on besides their lines."""
    ids: frozenset[str] = frozenset()
    """The ids of the answers that are kept."""

    def id_of(self, line: bytes) -> str:
        """Return the id of the answer to a line."""
        return f"{ANSWER_ID}{hashlib.sha256(self.settings + line.strip()).hexdigest()[:32]}"


class _RawBody(msgspec.Struct):
    """The body of a line, as it is written."""

    body: msgspec.Raw


class BatchReply(NamedTuple):
    """An application's answer."""

    status: int
    body: bytes


class BatchCounts(NamedTuple):
    """Numbers of answered and failed lines."""

    completed: int
    failed: int


async def run_batch(
    config: EngineConfig,
    options: ServerOptions,
    source: Path,
    target: Path,
    concurrency: int,
    *,
    restart: bool = False,
) -> BatchCounts:
    """Answer a batch file; output lines come in order of completion.

    Whole answers with status 200 that an earlier run has left are kept.

    Args:
        config: the engine's settings.
        options: the server's settings; those of connections have no effect.
        source: the requests.
        target: gets the answers.
        concurrency: number of requests that are open at a time.
        restart: true if all requests are answered anew.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: see `start_engine`, `check_adapter_names`, `claim`, `is_output_file` and
            `lines_of`; or both files are one.
        EngineError: the engine died; the lines that it left have errors in the output.
    """
    check_adapter_names(config, options)
    # Appended to, so that a start that fails takes nothing from a file that was there before.
    with source.open("rb") as lines, target.open("ab", buffering=0) as out:
        if os.path.sameopenfile(lines.fileno(), out.fileno()):
            raise ValueError(f"the answers cannot be written to the requests' file {target}")
        is_file = is_output_file(out, target)
        with progress_bars() as show:
            started = await start_engine(config, show, options.log_level)
        service, monitoring = service_of(started, config, options)
        try:
            app = create_app(
                service, monitoring, ServerOptions(unknown_fields=options.unknown_fields)
            )
            kind = os.fstat(lines.fileno()).st_mode
            waits = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or lines.isatty()
            answered = Answered(settings_of(config, options))
            if is_file:
                answered = kept_answers(
                    target.resolve(), answered, () if restart or waits else lines
                )
            asked = lines_of(lines, waits=waits)
            # The file may be another one by now.
            with target.open("ab", buffering=0) if is_file else nullcontext(out) as into:
                if not os.path.sameopenfile(out.fileno(), into.fileno()):
                    claim(into)
                done = await answer_all(app, asked, into, concurrency, answered)
            if service.engine.failed.is_set():
                raise EngineError(str(service.engine.failure))
            return done
        finally:
            await service.close()
            await service.engine.close()


def claim(out: IO[bytes]) -> None:
    """Keep other runs from an output as long as it is open.

    Raises:
        ValueError: another run has it, whose answers would be lost.
    """
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{out.name}: another run is writing its answers there") from error
    except OSError as error:  # not every file system has locks
        log.debug("%s is not locked: %s", out.name, error)


def is_output_file(out: IO[bytes], target: Path) -> bool:
    """Return whether an open output is a file, which is claimed then; anything else, such as a
    pipe, has no earlier answers.

    Raises:
        ValueError: see `claim`; or it has anything else than answers, as the file of the requests
            does, which would be removed.
    """
    if not stat.S_ISREG(os.fstat(out.fileno()).st_mode):
        return False
    claim(out)
    with target.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            cut_off = ANSWER_BEGINS.startswith(line)
            if line.strip() and not cut_off and not line.startswith(ANSWER_BEGINS):
                problem = f"line {number} of {target} is not an answer of a batch"
                raise ValueError(f"{problem}: name another OUTPUT, or remove that file")
    return True


def settings_of(config: EngineConfig, options: ServerOptions) -> bytes:
    """Return what answers depend on besides their requests."""
    weights = config.load_format, config.dtype, config.quantization, config.kv_cache_dtype
    own = config.model, config.lora, config.chat_template, *weights
    return msgspec.json.encode((own, msgspec.structs.replace(options, log_level="info")))


def kept_answers(target: Path, answered: Answered, asked: IO[bytes] | Sequence[bytes]) -> Answered:
    """Leave only whole answers with status 200 to these lines in the output of an earlier run, and
    return them. Half a line, failures and answers to other lines are removed.

    Args:
        target: the output.
        answered: The settings that the answers depend on.
        asked: the lines; a file is rewound.
    """
    wanted = set(map(answered.id_of, asked))
    if not isinstance(asked, Sequence):
        asked.seek(0)
    ids, dropped = set[str](), False
    with tempfile.TemporaryDirectory(prefix=".kept-", dir=target.parent) as scratch:
        kept = Path(scratch, target.name)
        with target.open("rb") as old, kept.open("wb") as new:
            for line in old:
                if (id := answer_of(line)) in wanted and id not in ids:
                    ids.add(str(id))
                    new.write(line)
                else:
                    dropped = True
        if dropped:
            shutil.copymode(target, kept)
            kept.replace(target)
    if ids:
        log.info("%s has %d answers, which are kept", target, len(ids))
    return answered._replace(ids=frozenset(ids))


def answer_of(line: bytes) -> str | None:
    """Return the id of the answer in a line of the output; None for a failure or half a line."""
    try:
        answer = msgspec.json.decode(line, type=_Answer)
    except ValueError:
        return None
    good = answer.response is not None and answer.response.status_code == 200
    return answer.id if good and line.endswith(b"\n") else None


async def lines_of(source: IO[bytes], *, waits: bool = False) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, each with its number.

    Args:
        source: the file.
        waits: true if the file is a pipe, socket or terminal, whose reader may wait for its writer:
            answers and signals go on meanwhile.

    Raises:
        ValueError: a line of a pipe is too long.
    """
    number = 0
    if not waits:
        for number, line in enumerate(source, 1):
            if line.strip():
                yield number, line
        return
    reader = asyncio.StreamReader(MAX_PIPED_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    try:
        while line := await reader.readline():
            number += 1
            if line.strip():
                yield number, line
    except ValueError as error:
        raise ValueError(f"line {number + 1} has more than {MAX_PIPED_LINE} bytes") from error


async def answer_all(
    app: ASGIApp,
    lines: AsyncIterator[tuple[int, bytes]],
    out: IO[bytes],
    concurrency: int,
    answered: Answered = Answered(),  # noqa: B008, it is frozen
) -> BatchCounts:
    """Answer all lines that are not answered, up to `concurrency` at a time."""
    counts = {True: 0, False: 0}
    seen: set[str] = set()
    turn = asyncio.Lock()

    async def next_line() -> tuple[int, bytes] | None:
        async with turn:
            return await anext(lines, None)

    async def work() -> None:
        while (numbered := await next_line()) is not None:
            answer = await answer_line(app, *numbered, seen, answered)
            if answer is None:
                counts[True] += 1
                continue
            counts[answer["error"] is None and answer["response"]["status_code"] == 200] += 1
            append(out, msgspec.json.encode(answer) + b"\n")

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:  # the file is closed then
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
    return BatchCounts(counts[True], counts[False])


def append(out: IO[bytes], line: bytes) -> None:
    """Write a line to a file as a whole, or nothing of it.

    Raises:
        OSError: it takes no more; the message names the file.
    """
    begin, rest = os.fstat(out.fileno()).st_size, memoryview(line)
    try:
        while rest:
            rest = rest[out.write(rest) :]
    except OSError as error:
        with suppress(OSError):  # what is not a file is not cut off
            out.truncate(begin)
        raise OSError(error.errno, error.strerror, str(out.name)) from error


async def answer_line(
    app: ASGIApp, number: int, line: bytes, seen: set[str], answered: Answered
) -> Json | None:
    """Return the line of the output for a line of the input; None if it is there.

    Args:
        app: the application.
        number: the line's number.
        line: a line of the input.
        seen: ids of the lines before it; its own is added.
        answered: the answers that are there.
    """
    answer: Json = {"id": f"{ANSWER_ID}{uuid.uuid4().hex}", "custom_id": None}
    try:
        value = strict_json.parse(line, "it")
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            answer["custom_id"] = value["custom_id"]
        request = msgspec.convert(value, BatchLine)
    except (ApiError, msgspec.ValidationError) as error:
        problem = error.message if isinstance(error, ApiError) else str(error)
        return answer | refused("invalid_line", f"line {number}: {problem}")
    if request.custom_id in seen:
        problem = f"line {number}: an earlier line has the same custom_id"
        return answer | refused("duplicate_custom_id", problem)
    seen.add(request.custom_id)
    answer["id"] = answered.id_of(line)
    if answer["id"] in answered.ids:
        return None
    if request.refusal is not None:
        return answer | refused("invalid_request", request.refusal)
    body = msgspec.json.decode(line.removeprefix(BOM_UTF8), type=_RawBody).body
    reply = await post(app, request.url, bytes(body))
    response = {
        "status_code": reply.status,
        "request_id": answer["id"],
        "body": msgspec.Raw(reply.body),
    }
    return answer | {"response": response, "error": None}


def refused(code: str, message: str) -> Json:
    """Return the output fields for a line that never became a request."""
    return {"response": None, "error": {"code": code, "message": message}}


async def post(app: ASGIApp, path: str, body: bytes) -> BatchReply:
    """Send an application a POST request, as its server would."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, list[bytes]()

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # the client stays
        return messages.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return BatchReply(status, b"".join(parts))
