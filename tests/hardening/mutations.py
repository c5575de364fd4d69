"""Requests that nobody should send: valid ones, mutated as JSON, as bytes, as HTTP, in delivery.

Everything follows from a seed and a number: `make_case(seed, 7)` is always the same.
"""

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from twolane.server.openai import protocol

from .wire import Case

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello ☃"}]
SEEDS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/completions", {"prompt": "Once upon", "max_tokens": 3}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "seed": 7}),
    ("POST", "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}),
    (
        "POST",
        "/v1/completions",
        {
            "prompt": [[5, 6], [7]],
            "max_tokens": 3,
            "min_tokens": 1,
            "stop_token_ids": [9],
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "ignore_eos": True,
            "priority": 1,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
    (
        "POST",
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "max_completion_tokens": 4,
            "temperature": 0.5,
            "stream": True,
            "user": "somebody",
        },
    ),
    (
        "POST",
        "/v1/completions",
        {
            "prompt": "Once upon a time",
            "max_tokens": 4,
            "echo": True,
            "logprobs": 2,
            "n": 2,
            "stop": ["zz", "q"],
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {"65": 5, "66": -5},
        },
    ),
    (
        "POST",
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 4,
            "logprobs": True,
            "top_logprobs": 3,
            "n": 2,
            "stop": "zz",
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("POST", "/tokenize", {"prompt": "Once ☃", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": MESSAGES}),
    ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/version", None),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
)
"""What is mutated; the model is served as "tiny"."""

FIELDS = sorted(
    {
        *protocol.CompletionRequest.model_fields,
        *protocol.ChatRequest.model_fields,
        *protocol.UNSUPPORTED,
        *protocol.UNSUPPORTED_CHAT,
        *protocol.UNSUPPORTED_COMPLETION,
        *protocol.WITHOUT_EFFECT,
    }
)
RAW = "\x00raw:"
"""Begins strings that are written into the JSON without quotes."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e-320, 1e308, -1e308),
    *(2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40),
    *("", " ", "1", "true", "a", "\x00", "\ufeff", "\ufffe", "😀", "e\u0301", "</s>", "<s>" * 50),
    *("a" * 3000, "\U0010ffff" * 300, "\r\n\r\n", "{{ 7 * 7 }}", "{% for x in y %}", "../../etc"),
    *([], {}, [[]], [[[]]], [None], [0], [-1], [255], [256], [2**40], [1.5], [True], ["", ""]),
    *([5] * 900, [5] * 1023, [5] * 1024, [5] * 5000, [[5]] * 40, ["a"] * 40, {"": ""}, {"a": {}}),
    *({"type": "text"}, {"type": "json_object"}, {"include_usage": "yes"}, {"5": 5}, {"x": 1e9}),
    *(RAW + text for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1E-400", "01")),
    *(RAW + text for text in ('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', "'a'", "undefined")),
    *(RAW + text for text in ("9" * 5000, "-" + "9" * 300, "0." + "1" * 5000, "1e" + "9" * 30)),
    *(RAW + "[" * depth + "]" * depth for depth in (64, 1000, 20000)),
    *(RAW + '{"a":' * depth + "1" + "}" * depth for depth in (64, 1000, 20000)),
)
JUNK = (b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f", b"\xef\xbb\xbf", b'"', b"\\")
HEADER_VALUES = (
    *("", " ", "\t", "0", "-1", "1", "abc", "1e3", "0x10", "99999999999999999999", "nan", "inf"),
    *("1, 2", "*", "close", "keep-alive", "chunked", "gzip", "Bearer ", "Bearer x", "Basic eDp5"),
    *("Bearer \xe9\xff", "\xff\xfe", "a" * 3000, "text/plain", "application/json; charset=utf-16"),
    *(
        "multipart/form-data",
        "multipart/form-data; boundary=x",
        "application/json;",
        "100-continue",
    ),
    *(
        "websocket",
        "h2c",
        "Upgrade, HTTP2-Settings",
        "%00",
        "../",
        "\x7f",
        "☃".encode().decode("latin-1"),
    ),
)
HEADER_NAMES = (
    *("Content-Type", "Content-Length", "Transfer-Encoding", "Connection", "Expect", "Host"),
    *("Authorization", "x-api-key", "X-Request-Id", "Accept", "Accept-Encoding", "Cookie", "Range"),
    *("x-slo-ttft-ms", "x-slo-tbt-ms", "x-slo-tpot-ms", "X-Forwarded-For", "X-Forwarded-Proto"),
    *("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"),
    *("Origin", "Upgrade", "TE", "Trailer", "Content-Encoding", "Content-MD5", "If-None-Match"),
    *("Access-Control-Request-Method", "HTTP2-Settings", "Keep-Alive", "traceparent", "X-\xff"),
)
TARGETS = (
    *("/", "//", "*", "/v1", "/v1/", "/v1//completions", "/v1/completions/", "/V1/completions"),
    *("/v1/models/", "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/%2e%2e", "/v1/models/a/b"),
    *("/v1/models/" + "a" * 5000, "/health?" + "x=1&" * 500, "/metrics?name[]=%ff", "/%", "/%zz"),
    *("http://elsewhere/v1/models", "http://[::1/v1", "/docs", "/redoc", "/openapi.json?x=%00"),
    *("/v1/completions#x", "/\xff", "/..%2f..%2fetc/passwd", "/v1/embeddings", "/v1/completions?a"),
    *("/tokenize", "/detokenize", "/version", "/v1/responses"),
)
METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PATCH",
    "get",
    "X",
)


@dataclass(frozen=True)
class Draft:
    """A request before it becomes bytes."""

    method: str
    target: str
    body: bytes | None
    headers: tuple[tuple[str, str], ...] = ()
    version: str = "HTTP/1.1"
    framed: bool = True
    """Whether Content-Length is to be added."""
    names: tuple[str, ...] = field(default=())

    def head(self) -> bytes:
        """Return the request line and headers."""
        headers = [("Host", "localhost"), ("Connection", "close"), *self.headers]
        if self.body is not None:
            headers.append(("Content-Type", "application/json"))
            if self.framed:
                headers.append(("Content-Length", str(len(self.body))))
        lines = [f"{self.method} {self.target} {self.version}"]
        lines += [f"{name}: {value}" for name, value in headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def named(self, name: str, **changes: Any) -> "Draft":
        """Return a changed draft that tells what was done to it."""
        return replace(self, names=(*self.names, name), **changes)


def make_case(seed: int, number: int) -> Case:
    """Return the case of that number."""
    chance = random.Random(f"{seed}:{number}")
    method, target, body = chance.choice(SEEDS)
    body = copy.deepcopy(body)
    names: list[str] = []
    if body is not None and chance.random() < 0.6:
        names += [mutate_json(body, chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
    data = None if body is None else write_json(body)
    draft = Draft(method, target, data, names=tuple(names))
    if data and chance.random() < 0.3:
        draft = mutate_bytes(draft, chance)
    if chance.random() < 0.4:
        draft = chance.choice(HTTP_MUTATIONS)(draft, chance)
    case = chance.choice(DELIVERIES)(draft, chance)
    return replace(case, name=f"{number}: {', '.join((*draft.names, case.name))}")


def write_json(body: Any) -> bytes:
    """Write JSON; strings that begin with `RAW` go in without quotes."""
    text = json.dumps(body)
    marker = json.dumps(RAW)[1:-1]
    pieces = text.split('"' + marker)
    for place, piece in enumerate(pieces[1:], 1):
        raw, end = json.decoder.py_scanstring('"' + piece, 1)
        pieces[place] = raw + piece[end - 1 :]
    return "".join(pieces).encode("utf-8", "surrogatepass")


def places(body: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a body with each of its keys."""
    keys = list(body) if isinstance(body, dict) else range(len(body))
    for key in keys:
        yield body, key
        if isinstance(body[key], dict | list):
            yield from places(body[key])


def mutate_json(body: Any, chance: random.Random) -> str:
    """Change a body in place; return what was done."""
    value = copy.deepcopy(chance.choice(VALUES))
    kind = chance.choice(("replace", "replace", "known field", "known field", "drop", "odd field"))
    if kind == "known field":
        name = chance.choice(FIELDS)
        body[name] = value
        return f"{name} = {value!r:.60}"
    found = list(places(body))
    if kind == "odd field" or not found:
        body[chance.choice(("", "x" * 2000, "\x00", "__proto__", "☃", "prompt ", "self"))] = value
        return "odd field"
    container, key = chance.choice(found)
    if kind == "drop":
        del container[key]
        return f"drop {key!r}"
    container[key] = value
    return f"{key!r:.30} = {value!r:.60}"


def mutate_bytes(draft: Draft, chance: random.Random) -> Draft:
    """Damage the body."""
    body = draft.body or b""
    begin = chance.randrange(len(body) + 1)
    end = min(len(body), begin + chance.randrange(1, 20))
    kind, data = chance.choice(
        (
            ("flip a bit", body[:begin] + flipped(body[begin:end], chance) + body[end:]),
            ("cut out", body[:begin] + body[end:]),
            ("cut off", body[:begin]),
            ("junk", body[:begin] + chance.choice(JUNK) + body[begin:]),
            ("random bytes", body[:begin] + chance.randbytes(9) + body[end:]),
            ("repeat", body[:end] + body[begin:]),
            ("twice", body + body),
            ("no bytes", b""),
            ("utf-16", body.decode("utf-8", "replace").encode("utf-16")),
            ("gzip", gzip.compress(body, mtime=0)),
            ("byte order mark", b"\xef\xbb\xbf" + body),
            ("duplicate keys", b"{" + body.strip(b"{}") + b"," + body.strip(b"{}") + b"}"),
        )
    )
    return draft.named(kind, body=data)


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Flip one bit of the first byte."""
    return bytes([data[0] ^ 1 << chance.randrange(8)]) + data[1:] if data else b""


HttpMutation = Callable[[Draft, random.Random], Draft]


def odd_header(draft: Draft, chance: random.Random) -> Draft:
    """Add a header that means something, with a value that does not."""
    name, value = chance.choice(HEADER_NAMES), chance.choice(HEADER_VALUES)
    framed = draft.framed and not (name == "Content-Length" and chance.random() < 0.7)
    headers = (*draft.headers, (name, value))
    return draft.named(f"header {name}: {value!r:.30}", headers=headers, framed=framed)


def broken_header(draft: Draft, chance: random.Random) -> Draft:
    """Add a header that is none."""
    name, value = chance.choice(
        (
            ("", ""),
            ("X Y", "a"),
            ("X\x00", "a"),
            ("X", "a\x00b"),
            ("X", "a\nb"),
            ("X", "a\rb"),
            ("X", "a\r\n folded"),
            ("X", "a\r\n\r\n"),
            ("X" * 70_000, "a"),
            ("X", "a" * 70_000),
            ("X", "\x01\x02"),
            (":", ":"),
        )
    )
    return draft.named("broken header", headers=(*draft.headers, (name, value)))


def many_headers(draft: Draft, chance: random.Random) -> Draft:
    """Add hundreds of headers."""
    count = chance.choice((100, 900, 3000))
    return draft.named(
        f"{count} headers", headers=(*draft.headers, *((f"X-{k}", "v") for k in range(count)))
    )


def odd_length(draft: Draft, chance: random.Random) -> Draft:
    """Lie about the length of the body."""
    body = draft.body if draft.body is not None else b"{}"
    values = (
        *("0", "-1", "-0", "+5", " 7 ", "7 7", "7,7", "7, 8", "0x5", "1e2", "", "abc", "\xb2"),
        *(str(2**31), str(2**63), str(2**64), "9" * 19, "9" * 20, "9" * 200, "1_0", "007"),
        *(str(len(body) - 1), str(len(body) + 1), str(len(body) * 2)),
    )
    value = chance.choice(values)
    headers = (*draft.headers, ("Content-Length", value))
    return draft.named(f"length {value[:20]!r}", body=body, headers=headers, framed=False)


def chunked(draft: Draft, chance: random.Random) -> Draft:
    """Send the body in chunks, well or badly."""
    body = draft.body if draft.body is not None else b"{}"
    half = len(body) // 2
    parts = (body[:half], body[half:]) if half else (body,)
    good = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part)
    kind, data = chance.choice(
        (
            ("good", good + b"0\r\n\r\n"),
            ("good", good + b"0\r\n\r\n"),
            ("good", b"".join(b"1\r\n%c\r\n" % byte for byte in body[:300]) + b"0\r\n\r\n"),
            ("extension", good.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\n\r\n"),
            ("trailer", good + b"0\r\nX-T: 1\r\n\r\n"),
            ("no end", good),
            ("bad size", b"zz\r\n" + body + b"\r\n0\r\n\r\n"),
            ("negative size", b"-5\r\n" + body + b"\r\n0\r\n\r\n"),
            ("huge size", b"ffffffffffffffffffff\r\n" + body),
            ("short size", b"1\r\n" + body + b"\r\n0\r\n\r\n"),
            ("no line end", b"%x" % len(body) + body),
            ("long extension", b"1;" + b"a" * 70_000 + b"\r\n{\r\n0\r\n\r\n"),
        )
    )
    coding = chance.choice(("chunked",) * 6 + ("Chunked", "gzip, chunked", "chunked, chunked", "x"))
    headers = (*draft.headers, ("Transfer-Encoding", coding))
    framed = chance.random() < 0.2
    return draft.named(f"chunked: {kind}", body=data, headers=headers, framed=framed)


def odd_line(draft: Draft, chance: random.Random) -> Draft:
    """Change the request line."""
    kind = chance.randrange(3)
    if kind == 0:
        method = chance.choice((*METHODS, "", "G\x00T", "\xff", "A" * 5000))
        return draft.named(f"method {method[:9]!r}", method=method)
    if kind == 1:
        target = chance.choice((*TARGETS, "", " ", "/a b", "/\x00", "/" + "a" * 70_000))
        return draft.named(f"target {target[:30]!r}", target=target)
    versions = (
        "HTTP/1.0",
        "HTTP/1.1 ",
        "HTTP/2.0",
        "HTTP/0.9",
        "HTTP/9.9",
        "HTTP/1",
        "http/1.1",
        "",
    )
    version = chance.choice(versions)
    return draft.named(f"version {version!r}", version=version)


HTTP_MUTATIONS: tuple[HttpMutation, ...] = (
    odd_header,
    odd_header,
    odd_header,
    broken_header,
    many_headers,
    odd_length,
    chunked,
    chunked,
    odd_line,
)


def written(draft: Draft) -> bytes:
    """Return the whole request."""
    return draft.head() + (draft.body or b"")


def at_once(draft: Draft, chance: random.Random) -> Case:
    """Send it all and wait."""
    return Case("at once", (written(draft),))


def in_pieces(draft: Draft, chance: random.Random) -> Case:
    """Send it in pieces."""
    data = written(draft)
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(1, 5)))
    edges = [0, *cuts, len(data)]
    pieces = (data[a:b] for a, b in pairwise(edges))
    return Case("in pieces", tuple(piece for piece in pieces if piece))


def drop_by_drop(draft: Draft, chance: random.Random) -> Case:
    """Send the last bytes one by one."""
    data = written(draft)
    return Case("drop by drop", (data[:-30], *(bytes([byte]) for byte in data[-30:])))


def leave_midway(draft: Draft, chance: random.Random) -> Case:
    """Close or reset the connection somewhere in the request."""
    data = written(draft)
    ending = chance.choice(("leave", "reset"))
    return Case(f"{ending} midway", (data[: chance.randrange(len(data))],), ending)


def leave_early(draft: Draft, chance: random.Random) -> Case:
    """Close or reset the connection before the answer."""
    ending = chance.choice(("leave", "reset"))
    return Case(f"{ending} before the answer", (written(draft),), ending)


def leave_stream(draft: Draft, chance: random.Random) -> Case:
    """Close the connection in the answer."""
    return Case("leave the answer", (written(draft),), taste=chance.randrange(1, 1500))


def stay_silent(draft: Draft, chance: random.Random) -> Case:
    """Send a part and wait: the server has to end this."""
    data = written(draft)
    return Case("stay silent midway", (data[: chance.randrange(len(data))],))


def pipelined(draft: Draft, chance: random.Random) -> Case:
    """Send a good request, this one and another good one without waiting."""
    if draft.method == "HEAD":  # whose answers cannot be told from others by their bytes
        draft = replace(draft, method="GET")
    good = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    data = good + written(draft).replace(b"Connection: close", b"X: y") + good
    return Case("pipelined", (data,), answers=3)


def closing_twice(draft: Draft, chance: random.Random) -> Case:
    """Send it twice where the first one said that it is the last."""
    return Case("sent twice", (written(draft) * 2,))


DELIVERIES: tuple[Callable[[Draft, random.Random], Case], ...] = (
    *(at_once,) * 12,
    *(in_pieces,) * 3,
    drop_by_drop,
    leave_midway,
    *(leave_early,) * 2,
    *(leave_stream,) * 2,
    stay_silent,
    *(pipelined,) * 2,
    closing_twice,
)
