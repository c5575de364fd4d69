"""How long one client waits while another sends the worst that there is: a table.

`python -m tests.hardening.attention [MIB [PART]]` starts a server, watches a stream of it and its
/health from other processes, and sends large bodies, templates, names, stop lists,
log-probabilities, many answers, bad UTF-8 and long texts, one after the other; with PART only those
whose names hold it.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..model.checkpoints import VOCAB
from ..server.serving import Served, serving, write_tiny_model
from .checkpoint import write_text_model
from .footprint import MIB, rss
from .stalls import Watcher, longest

CALM_SECONDS = 10.0
BAR, TIMES = 0.15, 2.0
"""A gap may be this many seconds, or this multiple of the longest of the same stream in calm."""
BACK_SECONDS, BACK = 60.0, 1.1
"""After each of them the API process must be at this multiple of its memory again, in so long."""
ARGUMENTS = ("--load-format", "dummy", "--kv-tokens", "200000", "--max-queue", "256")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NAMING = "{% for m in messages %}{{ m.name + ': ' if m.name }}{{ m.content }}\n{% endfor %}"
"""A chat template that shows names."""


class Attack(NamedTuple):
    """One request."""

    name: str
    path: str
    body: bytes


class Row(NamedTuple):
    """What came of an attack: times in seconds, memory in MiB."""

    name: str
    status: int
    took: float
    stream: float
    health: float
    peak: float
    after: float
    back: float
    """Seconds until the memory was back, or `BACK_SECONDS` if it was not."""


def filled(opening: bytes, unit: bytes, closing: bytes, size: int) -> bytes:
    """Return a body of nearly `size` bytes."""
    return opening + unit * ((size - len(opening) - len(closing)) // len(unit)) + closing


def large_bodies(size: int) -> dict[str, bytes]:
    """Return nine kinds of bodies that are long to read, and one that is no text."""
    return {
        "prompts": filled(b'{"max_tokens":1,"prompt":[', b"[0],", b"[0]]}", size),
        "ids": filled(b'{"max_tokens":1,"prompt":[', b"0,", b"0]}", size),
        "unknown field": filled(b'{"prompt":[5],"x":[', b"{},", b"{}]}", size),
        "metadata": filled(b'{"prompt":[5],"metadata":{"a":[', b'"a",', b'"a"]}}', size),
        "stop list": filled(b'{"prompt":[5],"stop":[', b'"a",', b'"a"]}', size),
        "logit_bias": filled(b'{"prompt":[5],"logit_bias":{', b'"1":1,', b'"2":1}}', size),
        "brackets": filled(b'{"prompt":', b"[", b"]}", size),
        "text": filled(b'{"max_tokens":1,"prompt":"', b"a b", b'"}', size),
        "escapes": filled(b'{"max_tokens":1,"prompt":"', b"\\u0061", b'"}', size),
        "bad UTF-8": filled(b'{"prompt":"', b"\xff\xfe", b'"}', size),
    }


def attacks(size: int) -> Iterator[Attack]:
    """Yield all of them; those that are served are as large as the server takes."""
    for name, body in large_bodies(size).items():
        yield Attack(f"{name}, {size >> 20} MiB", COMPLETIONS, body)
    turn, named = b'{"role":"user","content":"aaaa"},', b'{"role":"user","name":"n","content":"a"},'
    yield Attack("messages", CHAT, filled(b'{"messages":[', turn, turn[:-1] + b"]}", size))
    yield Attack(
        "messages, 60 KiB", CHAT, filled(b'{"messages":[', turn, turn[:-1] + b"]}", 60_000)
    )
    yield Attack("names, 60 KiB", CHAT, filled(b'{"messages":[', named, named[:-1] + b"]}", 60_000))
    one = b'{"role":"user","content":"' + b"a b" * 300_000 + b'"}'
    yield Attack("one long message", CHAT, b'{"messages":[' + one + b"]}")
    yield Attack("/tokenize, 1 MiB", "/tokenize", filled(b'{"prompt":"', b"a b", b'"}', MIB))
    names = filled(b'{"return_token_strs":true,"prompt":"', b"a b", b'"}', MIB)
    yield Attack("/tokenize with names", "/tokenize", names)
    yield Attack("/tokenize, too long", "/tokenize", filled(b'{"prompt":"', b"a b", b'"}', size))
    small = {"prompt": [5] * 500, "max_tokens": 500, "ignore_eos": True}
    for name, more in {
        "stop strings": {"stop": ["never to be seen"] * 4},
        "log-probabilities": {"logprobs": 20, "n": 8},
        "prompt log-probabilities": {"prompt_logprobs": 20, "prompt": [[5] * 500] * 16},
        "n": {"n": 16},
    }.items():
        yield Attack(name, COMPLETIONS, json.dumps({**small, **more}).encode())


def send(served: Served, attack: Attack) -> tuple[int, float]:
    """Return the status, 0 for a connection that broke off, and the peak of memory in MiB."""
    try:
        status = served.request(attack.path, data=attack.body)[0]
    except OSError:
        status = 0
    status_file = Path(f"/proc/{served.process.pid}/status").read_text()
    peak = next(line for line in status_file.splitlines() if line.startswith("VmHWM"))
    return status, int(peak.split()[1]) / 1024


def settled(served: Served, bound: float) -> tuple[float, float]:
    """Wait until the API process is at `bound` bytes again, at most so long.

    Returns:
        Its MiB, and the seconds that it took.
    """
    began = time.monotonic()
    while rss(served.process.pid) > bound and time.monotonic() < began + BACK_SECONDS:
        time.sleep(0.5)
    return rss(served.process.pid) / MIB, time.monotonic() - began


def run(served: Served, size: int, part: str) -> tuple[list[Row], float]:
    """Return a row for each attack whose name holds `part`, and the longest gap of the stream
    without them."""
    good = {"prompt": [5] * 20, "max_tokens": 4, "metadata": {"a": "x" * 70_000}}
    assert served.request(COMPLETIONS, good)[0] == 200  # the process that checks bodies starts
    assert served.request("/tokenize", {"prompt": "a"})[0] == 200
    scored = {"prompt": [5] * 20, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 2, "n": 2}
    assert served.request(COMPLETIONS, scored)[0] == 200
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    assert served.request(CHAT, asked)[0] == 200
    stream, health = Watcher(served.base, "stream"), Watcher(served.base, "health")
    began = time.monotonic()
    time.sleep(CALM_SECONDS)
    calm_until, sent = time.monotonic(), []
    resting = rss(served.process.pid)
    for attack in (each for each in attacks(size) if part in each.name):
        Path(f"/proc/{served.process.pid}/clear_refs").write_text("5")  # the peak counts anew
        at = time.monotonic()
        status, peak = send(served, attack)
        until = time.monotonic()
        after, back = settled(served, BACK * resting)
        sent.append((attack.name, status, at, until, peak, after, back))
        print(f"{attack.name}: {status} in {until - at:.1f} s, {after:.0f} MiB", flush=True)
    gaps, probes = stream.close(), health.close()
    rows = [
        Row(name, status, b - a, longest(gaps, a, b), longest(probes, a, b), *memory)
        for name, status, a, b, *memory in sent
    ]
    return rows, longest(gaps, began, calm_until)


def main() -> int:
    """Print the table; the exit code is 1 if somebody waited or memory was held for too long."""
    size = int(sys.argv[1] if len(sys.argv) > 1 else 32) * MIB - 4096
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    with tempfile.TemporaryDirectory() as folder:
        model = write_text_model(Path(folder) / "model")
        write_tiny_model(model, vocab_size=VOCAB)  # with a long context
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "chat_template.jinja").write_text(NAMING)
        config.pop("chat_template", None)
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        with serving(str(model), *ARGUMENTS) as served:
            rows, calm = run(served, size, part)
    bar = max(BAR, TIMES * calm)
    print(f"\nLongest gap of the stream in calm {calm:.3f} s: bar {bar:.3f} s.\n")
    print("| sent | status | took s | stream s | /health s | peak MiB | after MiB | back s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.name} | {row.status} | {row.took:.1f} | {row.stream:.3f} | "
            f"{row.health:.3f} | {row.peak:.0f} | {row.after:.0f} | {row.back:.1f} |"
        )
    waited = any(max(row.stream, row.health) > bar for row in rows)
    return int(waited or any(row.back >= BACK_SECONDS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
