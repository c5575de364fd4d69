"""Readers of public request traces, and cuts and scalings of traces.

Three forms are read, each also gzipped, and told apart by content, never by file name:

- CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure Public Dataset);
- the same with an empty TIMESTAMP: lengths without arrival times;
- JSON lines with timestamp (ms), input_length, output_length and, optionally, hash_ids, one id a
  block of 512 tokens, equal ids meaning equal content and equal prefix (Mooncake, FAST '25).
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import msgspec

from twolane.common.checked_json import UNREADABLE

BLOCK_TOKENS = 512
"""Tokens per hash id of a Mooncake trace."""
CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_COLUMNS = ("timestamp", "input_length", "output_length")
MAX_BYTES = 1 << 30
"""Most bytes of a trace's text; a compressed file may stand for any number."""


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, row (line) and column."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a workload."""

    arrival: float | None
    """Seconds after the first request of the trace; None: the trace has only lengths."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks, equal for equal content; empty: the prompt shares nothing."""
    block_tokens: int = BLOCK_TOKENS
    """Tokens per hash id; only the last block may be shorter."""


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Read a trace in order of arrival.

    Raises:
        TraceError: the file is missing, unreadable or empty, or a column is missing or bad.
    """
    name = str(path)
    text = _read_text(Path(path))
    read = _read_jsonl if text.lstrip().startswith("{") else _read_csv
    requests = read(name, text)
    if not requests:
        raise TraceError(f"{name}: no requests in it")
    return _rebase(name, requests)


def has_arrivals(requests: Sequence[TraceRequest]) -> bool:
    """Return whether the requests have arrival times."""
    return bool(requests) and requests[0].arrival is not None


def window(
    requests: Sequence[TraceRequest], offset: float = 0.0, duration: float | None = None
) -> list[TraceRequest]:
    """Return the requests that arrive in [offset, offset + duration), with times from `offset`;
    seconds."""
    end = float("inf") if duration is None else offset + duration
    return [
        msgspec.structs.replace(request, arrival=request.arrival - offset)
        for request in requests
        if request.arrival is not None and offset <= request.arrival < end
    ]


def scale_rate(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the requests with arrival times at `factor` times the speed."""
    return [
        msgspec.structs.replace(request, arrival=request.arrival / factor)
        for request in requests
        if request.arrival is not None
    ]


def scale_lengths(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the requests with lengths times `factor`, at least one token each.

    Shared blocks shrink and grow with the prompts, so that the same share of a prompt is reused.
    """
    return [_scale(request, factor) for request in requests]


def clip_lengths(
    requests: Sequence[TraceRequest], max_prompt: int | None = None, max_output: int | None = None
) -> list[TraceRequest]:
    """Return the requests with lengths cut to at most this many tokens; prompts keep their
    start."""
    clipped = []
    for request in requests:
        prompt = min(request.prompt_tokens, max_prompt or request.prompt_tokens)
        output = min(request.output_tokens, max_output or request.output_tokens)
        blocks = request.hash_ids[: -(-prompt // request.block_tokens)]
        clipped.append(
            msgspec.structs.replace(
                request, prompt_tokens=prompt, output_tokens=output, hash_ids=blocks
            )
        )
    return clipped


def continued(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the requests so that a prompt's last block, which is partial, begins the longer block
    of the next turn.

    Recorded ids are of whole contents, so that such a block has one of its own although the next
    prompt repeats its tokens. Taken for the next turns of one conversation are blocks that follow
    the same one, each longer than those before; where others follow, conversations branch, and ids
    stay as they are.
    """
    after: dict[int, dict[int, int]] = {}
    for request in requests:
        ids, size = request.hash_ids, request.block_tokens
        for place in range(1, len(ids)):
            tokens = min(size, request.prompt_tokens - place * size)
            after.setdefault(ids[place - 1], {}).setdefault(ids[place], tokens)
    return [_continued(request, after) for request in requests]


def _continued(request: TraceRequest, after: Mapping[int, Mapping[int, int]]) -> TraceRequest:
    if len(request.hash_ids) < 2:
        return request
    before = request.hash_ids[:-1]
    following = after[before[-1]]
    if any(shorter >= longer for shorter, longer in pairwise(following.values())):
        return request
    return msgspec.structs.replace(request, hash_ids=(*before, [*following][-1]))


def _scale(request: TraceRequest, factor: float) -> TraceRequest:
    def scaled(tokens: int) -> int:
        return max(1, round(tokens * factor))

    block = scaled(request.block_tokens)
    prompt = scaled(request.prompt_tokens)
    if request.hash_ids:
        full = len(request.hash_ids) - 1
        last = request.prompt_tokens - full * request.block_tokens
        prompt = full * block + min(block, scaled(last))
    return msgspec.structs.replace(
        request,
        prompt_tokens=prompt,
        output_tokens=scaled(request.output_tokens),
        block_tokens=block,
    )


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw = (gzip.GzipFile(fileobj=file) if packed else file).read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise TraceError(f"{path}: its text has more than {MAX_BYTES >> 20} MiB")
        return raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not text: {error}") from error


def _read_csv(name: str, text: str) -> list[TraceRequest]:
    rows = csv.DictReader(io.StringIO(text))
    try:
        return _csv_requests(name, rows)
    except csv.Error as error:  # such as a field without an end
        raise TraceError(f"{name}: row {rows.line_num + 1}: {error}") from error


def _csv_requests(name: str, rows: "csv.DictReader[str]") -> list[TraceRequest]:
    for column in CSV_COLUMNS:
        if column not in (rows.fieldnames or ()):
            raise TraceError(
                f"{name}: row 1: no column {column}; a CSV trace has {', '.join(CSV_COLUMNS)}, "
                f"a JSON trace {', '.join(JSON_COLUMNS)}"
            )
    requests = []
    for row in rows:
        where = f"{name}: row {rows.line_num}"
        time, prompt, output = (row[column] for column in CSV_COLUMNS)
        requests.append(
            TraceRequest(
                arrival=_timestamp(where, time),
                prompt_tokens=_tokens(where, CSV_COLUMNS[1], prompt),
                output_tokens=_tokens(where, CSV_COLUMNS[2], output),
            )
        )
    return requests


def _timestamp(where: str, text: str | None) -> float | None:
    """Return UTC seconds; digits beyond the microsecond are dropped."""
    if not text or not text.strip():
        return None
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise TraceError(f"{where}: column TIMESTAMP: {text!r} is not a time") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _tokens(where: str, column: str, value: object) -> int:
    try:
        tokens = int(value) if isinstance(value, int | str) else 0
    except ValueError:
        tokens = 0
    if tokens < 1:
        raise TraceError(f"{where}: column {column}: {value!r} is not a positive whole number")
    return tokens


def _read_jsonl(name: str, text: str) -> list[TraceRequest]:
    decode = msgspec.json.Decoder(dict[str, object]).decode
    requests = []
    for number, line in enumerate(text.split("\n"), 1):  # strings may hold other ends of lines
        if not line.strip():
            continue
        where = f"{name}: row {number}"
        try:
            row = decode(line)
        except UNREADABLE as error:
            raise TraceError(f"{where}: is not a JSON object: {error}") from error
        requests.append(_json_request(where, row))
    return requests


def _json_request(where: str, row: dict[str, object]) -> TraceRequest:
    for column in JSON_COLUMNS:
        if column not in row:
            raise TraceError(f"{where}: no column {column}")
    time = row["timestamp"]
    if time is not None and (not isinstance(time, int | float) or isinstance(time, bool)):
        raise TraceError(f"{where}: column timestamp: {time!r} is not a number of milliseconds")
    prompt = _tokens(where, "input_length", row["input_length"])
    return TraceRequest(
        arrival=None if time is None else time / 1e3,
        prompt_tokens=prompt,
        output_tokens=_tokens(where, "output_length", row["output_length"]),
        hash_ids=_hash_ids(where, row.get("hash_ids", []), prompt),
    )


def _hash_ids(where: str, value: object, prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(i, int) and i >= 0 for i in value):
        raise TraceError(f"{where}: column hash_ids: not a list of whole numbers")
    if max(value, default=0) >= 1 << 64:
        raise TraceError(f"{where}: column hash_ids: {max(value)} is above 64 bits")
    blocks = -(-prompt_tokens // BLOCK_TOKENS)
    if value and len(value) != blocks:
        raise TraceError(
            f"{where}: column hash_ids: {len(value)} ids for {prompt_tokens} tokens, "
            f"which are {blocks} blocks of {BLOCK_TOKENS}"
        )
    return tuple(value)


def _rebase(name: str, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Sort by arrival and set the first one to 0; all requests have a time, or none has."""
    timed = [request for request in requests if request.arrival is not None]
    untimed = [request for request in requests if request.arrival is None]
    if timed and untimed:
        raise TraceError(f"{name}: the time column is empty in {len(untimed)} rows but not in all")
    if untimed:
        return untimed
    first = min(request.arrival or 0.0 for request in timed)
    rebased = [
        msgspec.structs.replace(request, arrival=(request.arrival or 0.0) - first)
        for request in timed
    ]
    return sorted(rebased, key=lambda request: request.arrival or 0.0)
