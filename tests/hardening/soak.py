"""Mixed traffic of two keys on one server for a long time; greedy answers are compared.

    python -m tests.hardening.soak SECONDS [SEED]

Chat, streams, adapters, tools, grammars, several answers, refusals and abandoned streams. Each
greedy answer must be that of the same request alone, and nothing may be left in flight. It prints
the memory and the files of the server every minute.
"""

import json
import random
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from ..model.adapters import make_adapter
from ..server.serving import PATIENCE, Served, serving, wait_for
from .checkpoint import write_text_model
from .footprint import MIB, Footprint

KEYS, THREADS, PROMPTS = ("key-a", "key-b"), 5, 30
ARGUMENTS = ("--kv-tokens", "6000", "--max-running", "16", "--served-model-name", "base")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"


class Soak:
    """Traffic on a server with an adapter `tuned`, and what became of it."""

    def __init__(self, served: Served, seed: int) -> None:
        self._address = urllib.parse.urlsplit(served.base).netloc
        self.counts = Counter[str]()
        rng = random.Random(seed)
        shared = "You are a helper. " * 4
        texts = [
            "".join(rng.choices("abcdefgh ijklm nop", k=rng.randint(5, 200))) for _ in range(9)
        ]
        self._bodies = [
            {
                "model": rng.choice(("base", "tuned")),
                "messages": [
                    {"role": "user", "content": (shared if i % 2 else "") + rng.choice(texts)}
                ],
                "temperature": 0,
                "max_tokens": 20 + i * 2,
                "return_token_ids": True,
            }
            for i in range(PROMPTS)
        ]
        self._right = [self._tokens(body) for body in self._bodies]

    def run(self, seed: int, latest: float) -> None:
        """Ask until a time on the monotonic clock."""
        try:
            self._run(seed, latest)
        except BaseException:
            self.counts["FAILED"] += 1
            raise

    def _run(self, seed: int, latest: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < latest:
            place, kind = rng.randrange(PROMPTS), rng.random()
            if kind < 0.4:
                self._compare(place, self._tokens(self._bodies[place]), whole=True)
            elif kind < 0.7:
                self._stream(place, rng.choice((10**6, rng.randint(0, 30))))
            else:
                self._other(rng, self._bodies[place])
            time.sleep(rng.random() * 0.2)

    def ask(self, path: str, body: object) -> tuple[int, Any]:
        """Return status and parsed answer, by either key."""
        connection = HTTPConnection(self._address, timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key()}"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        self.counts[str(answer.status)] += 1
        return answer.status, found

    def _key(self) -> str:
        return random.choice(KEYS)

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        status, found = self.ask(CHAT, body)
        assert status == 200, found
        tokens: list[int] = found["choices"][0]["token_ids"]
        return tokens

    def _compare(self, place: int, tokens: list[int], *, whole: bool) -> None:
        right = self._right[place] if whole else self._right[place][: len(tokens)]
        self.counts["same" if tokens == right else "DIFFER"] += 1

    def _stream(self, place: int, most: int) -> None:
        """Read a stream to its end, or leave after so many tokens."""
        connection = HTTPConnection(self._address, timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key()}"}
        body = json.dumps({**self._bodies[place], "stream": True})
        connection.request("POST", CHAT, body, headers)
        tokens: list[int] = []
        whole = False
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or ()
            whole |= line.startswith(b"data: [DONE]")
            if len(tokens) >= most:
                break
        connection.close()
        self._compare(place, tokens, whole=whole)
        self.counts["streams" if whole else "abandoned"] += 1

    def _other(self, rng: random.Random, body: dict[str, Any]) -> None:
        """Ask for what is not compared, or is refused."""
        text = body["messages"][0]["content"]
        schema = {"type": "object", "properties": {f"k{rng.randrange(50)}": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        asked = rng.choice(
            [
                ("/v1/completions", {"prompt": text, "n": 3, "max_tokens": 20, "temperature": 1}),
                (CHAT, {**body, "tools": [TOOL], "tool_choice": rng.choice(("auto", "none"))}),
                (CHAT, {**body, "response_format": form}),
                ("/v1/messages", {"messages": body["messages"], "max_tokens": 20, "model": "base"}),
                ("/v1/responses", {"input": text, "max_output_tokens": 20}),
                ("/v1/completions", {"prompt": text, "max_tokens": 10**6}),
                (CHAT, {**body, "model": "unknown"}),
            ]
        )
        status, found = self.ask(*asked)
        assert status in (200, 400, 404), found


def main() -> int:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as name:
        model = write_text_model(Path(name) / "model")
        adapter = make_adapter(model, Path(name) / "adapter")
        keys = [word for key in KEYS for word in ("--api-key", key)]
        more = ("--lora", f"tuned={adapter}", "--salt-per-key" if seed % 2 else "--prefix-cache")
        with serving(str(model), *ARGUMENTS, *keys, *more) as served:
            served.key = KEYS[0]
            soak, latest = Soak(served, seed), time.monotonic() + seconds
            clients = [
                threading.Thread(target=soak.run, args=(100 * seed + n, latest))
                for n in range(THREADS)
            ]
            for client in clients:
                client.start()
            while any(client.is_alive() for client in clients):
                time.sleep(min(60.0, max(1.0, latest - time.monotonic())))
                now = Footprint.of(served)
                front, engine = now.front_rss // MIB, now.engine_rss // MIB
                files = now.front_files.total(), now.engine_files.total()
                print(f"MiB {front} {engine}, files {files}, {dict(soak.counts)}", flush=True)
            wait_for(lambda: not served.metrics()["requests_in_flight"])
    return int(soak.counts["DIFFER"] + soak.counts["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
