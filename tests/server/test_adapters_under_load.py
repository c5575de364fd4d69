"""Adapters come, answer and go for minutes, beside requests of others."""

import json
import os
import random
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from .serving import Served, serving
from .test_adapters import body, expected, folder, load_into, unload_from  # noqa: F401  # fixtures

SECONDS = float(os.environ.get("TWOLANE_TEST_SOAK_SECONDS", "600"))
"""How long the load lasts; adapters come and go in its second half."""
GROWTH = 32 << 20
"""Bytes by which a process may grow in the second half."""
VERSIONS = ("b", "c")


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


class Load:
    """Clients of a server, each a thread; what goes wrong is kept."""

    def __init__(self, served: Served, files: Path, answers: dict) -> None:
        self.served, self.folder, self.expected = served, files, answers
        self.seen: Counter[str] = Counter()
        self.wrong: list[object] = []
        self.gaps: dict[bool, list[float]] = {False: [], True: []}
        """Seconds between two tokens of the base model, without and with the coming and going."""
        self.churns = False
        self.shared: dict[str, str] = {}
        """Version of adapters that anybody may ask for."""
        self.stopped = threading.Event()

    def ask(self, model: str, version: str | None, *, may_be_gone: bool = False) -> None:
        """Check an answer."""
        status, _, answer = self.served.request("/v1/completions", body(model))
        if status == 404 and may_be_gone:
            self.seen["gone"] += 1
            return
        if status != 200 or answer["choices"][0]["token_ids"] != self.expected[version]:
            self.wrong.append((model, version, status, answer))
            return
        self.seen[f"answers of {version}"] += 1

    def asking(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.stopped.is_set():
            shared = list(self.shared.items())
            kinds = [("base", None), ("the-first", "a"), *shared]
            model, version = rng.choice(kinds)
            self.ask(model, version, may_be_gone=version in VERSIONS)

    def streaming(self) -> None:
        """Read long answers of the base model token by token, and time the gaps."""
        asked = json.dumps(body("base", max_tokens=200, stream=True)).encode()
        headers = {"Content-Type": "application/json"}
        while not self.stopped.is_set():
            request = urllib.request.Request(f"{self.served.base}/v1/completions", asked, headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                churned, before = self.churns, None
                for line in answer:
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        if before is not None and churned == self.churns:
                            self.gaps[churned].append(now - before)
                        before = now

    def churning(self) -> None:
        """Load, ask and unload: under a name that is always the same, and under new ones."""
        turn = 0
        while not self.stopped.is_set():
            version, name = VERSIONS[turn % 2], f"shared-{turn}"
            for each in ("again", name):
                answer = load_into(self.served, each, self.folder / version)
                if answer[0] != 200:
                    self.wrong.append((each, answer))
            self.shared[name] = version
            self.ask("again", version)  # it may find the pages of an earlier load of these files
            self.ask("again", version)
            bad = load_into(self.served, "bad", self.folder / "foreign")[0]
            del self.shared[name]
            gone = [unload_from(self.served, each)[0] for each in ("again", name)]
            if (bad, gone) != (400, [200, 200]):
                self.wrong.append((bad, gone))
            turn += 1
            self.seen["turns"] = turn


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 300)
def test_adapters_come_and_go_under_load(folder, expected):  # noqa: F811
    args = ("--lora", f"the-first={folder / 'a'}", "--lora-endpoints", "--max-loras", "4")
    options = ("--served-model-name", "base", "--kv-tokens", "4000", "--hang-seconds", "120")
    with serving(str(folder / "base"), *args, *options) as served:
        load = Load(served, folder, expected)
        clients = [threading.Thread(target=load.asking, args=[seed]) for seed in range(2)]
        clients.append(threading.Thread(target=load.streaming))
        for client in clients:
            client.start()
        time.sleep(SECONDS / 2)
        load.churns = True
        clients.append(threading.Thread(target=load.churning))
        clients[-1].start()
        pids = {"engine": served.engine_pid, "API": served.process.pid}
        time.sleep(SECONDS / 10)
        early = {name: resident(pid) for name, pid in pids.items()}
        time.sleep(SECONDS * 4 / 10)
        grown = {name: resident(pid) - early[name] for name, pid in pids.items()}
        load.stopped.set()
        for client in clients:
            client.join()
    gaps = {churned: sorted(each) for churned, each in load.gaps.items()}
    for churned, each in gaps.items():
        late = each[int(len(each) * 0.999)]
        print(f"churn {churned}: {len(each)} gaps, P99.9 {late:.4f} s, longest {each[-1]:.4f} s")
    longest = gaps[True][-1] / gaps[False][-1]
    print(f"longest gap of others over that without: {longest:.2f} (bar 2)")
    print(f"{len(load.wrong)} wrong answers", load.wrong[:5])
    print(load.seen, {name: f"+{size / 2**20:.1f} MiB" for name, size in grown.items()})
    assert not load.wrong
    assert load.seen["turns"] > 5
    assert max(grown.values()) < GROWTH
    without, beside = (each[int(len(each) * 0.999)] for each in gaps.values())
    assert beside <= 2 * without
