"""How long one client's stream and /health stand still while another client sends something.

Who watches is a process of its own: what sends 32 MiB holds its own Python up.
"""

import json
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise

STREAM = {"prompt": [5], "max_tokens": 30_000, "ignore_eos": True, "stream": True, "temperature": 0}
PROBE_SECONDS = 0.01
SETTLED = 50
"""A stream is watched from its token of this number on."""


class Watcher:
    """Watches a stream, or /health, of a server from another process until it is asked.

    Args:
        base: URL of the server.
        what: "stream" or "health".
    """

    def __init__(self, base, what):
        command = [sys.executable, "-m", __name__, base, what]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "watching\n"

    def close(self):
        """Return when something came: pairs of monotonic seconds between which nothing did."""
        said, _ = self._process.communicate("enough\n", timeout=60)
        return [(begin, end) for begin, end in json.loads(said)]


def longest(gaps, begin, end):
    """Return the longest of the gaps that lie at least in part between two moments, in seconds."""
    return max((b - a for a, b in gaps if b > begin and a < end), default=0.0)


def watch_stream(base, over):
    """Yield each gap between two tokens; begin anew when the stream is at its end."""
    while not over():
        request = urllib.request.Request(
            base + "/v1/completions",
            json.dumps(STREAM).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            at = []
            for line in response:
                if line.startswith(b"data: {"):
                    at.append(time.monotonic())
                    if len(at) == SETTLED:
                        print("watching", flush=True)
                    if over():
                        break
        yield from pairwise(at[SETTLED - 1 :])


def watch_health(base, over):
    """Yield the time of each probe, from its sending to its answer."""
    print("watching", flush=True)
    while not over():
        began = time.monotonic()
        with urllib.request.urlopen(base + "/health", timeout=120) as response:
            response.read()
        yield began, time.monotonic()
        time.sleep(PROBE_SECONDS)


def main():
    """Watch until a line comes on standard input; write the gaps to standard output."""
    import select

    def over():
        return bool(select.select([sys.stdin], [], [], 0)[0])

    base, what = sys.argv[1:]
    watch = {"stream": watch_stream, "health": watch_health}[what]
    print(json.dumps(list(watch(base, over))))


if __name__ == "__main__":
    main()
