"""The server under abuse, and the questions that show whether it is unhurt."""

import json
import random
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

from ..server.serving import Served, wait_for
from ..server.test_lifecycle import Stream

RUNNING = 8
PAGE = 16
PAGES_EACH = 63
"""A request that fills these pages together with `RUNNING - 1` others fills the pool."""
ARGUMENTS = (
    *("--served-model-name", "tiny", "--max-queue", "64", "--max-running", str(RUNNING)),
    *("--kv-tokens", str(RUNNING * PAGES_EACH * PAGE), "--page-size", str(PAGE)),
    *("--arrival-seconds", "3", "--allow-priority"),
)
PATH = "/v1/completions"
GOOD = {"prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}

STARTING = {"/tokenize": {"prompt": "long or short"}, "/detokenize": {"tokens": [5, 6]}}


class Target:
    """A server with `ARGUMENTS` on a model of `checkpoint.write_text_model`."""

    def __init__(self, served: Served) -> None:
        self.served = served
        address = urllib.parse.urlsplit(served.base)
        self.address = (address.hostname, address.port)
        self.context: int = served.request("/v1/models")[2]["data"][0]["max_model_len"]
        self.asked = 0
        """Requests of its own that were answered."""
        self._right = self._good_text()

    def warm_up(self, count: int) -> None:
        """Ask for prompts of all lengths: the engine keeps compiled kernels of many shapes."""
        chance = random.Random(count)
        lengths = [chance.randrange(1, self.context - 12) for _ in range(count)]
        bodies = [{**GOOD, "prompt": [9 + length % 200] * length} for length in lengths]
        with ThreadPoolExecutor(RUNNING) as pool:
            statuses = set(pool.map(lambda body: self.served.request(PATH, body)[0], bodies))
        assert statuses == {200}
        # Each process and each worker that the server starts when it is first needed.
        large = {**GOOD, "metadata": {"padding": "x" * 70_000}}
        assert self.served.request(PATH, large)[0] == 200
        for path in ("/tokenize", "/detokenize"):
            assert self.served.request(path, STARTING[path])[0] == 200
        self.asked += count + 1

    def check_good_request(self) -> None:
        """A good request gets the answer that it got at the start."""
        assert self._good_text() == self._right

    def check_quiet(self) -> None:
        """Nothing is left in flight."""
        wait_for(lambda: not any(self._in_flight()))

    def check_room(self) -> None:
        """Every slot and every page can be used: answers that need all of them run together."""
        before = self.served.metrics()["num_preemptions_total"]
        tokens = PAGES_EACH * PAGE
        short = tokens // 8  # the last one has long begun when the first one ends
        prompts = [
            [10 + index, *[20 + (index + place) % 100 for place in range(short - 1)]]
            for index in range(RUNNING)
        ]
        body = {"prompt": prompts, "max_tokens": tokens - short, "ignore_eos": True}
        begun, ends = set(), []
        for event in Stream(self.served, body).events():
            [choice] = event["choices"]
            begun.add(choice["index"])
            if choice["finish_reason"] is not None:
                assert len(begun) == RUNNING, "one ended before all had begun"
                ends.append(choice["finish_reason"])
        assert ends == ["length"] * RUNNING
        self.asked += RUNNING
        assert self.served.metrics()["num_preemptions_total"] == before
        self.check_quiet()

    def _good_text(self) -> str:
        status, _, body = self.served.request(PATH, GOOD)
        assert status == 200, body
        self.asked += 1
        return json.dumps(body["choices"])

    def _in_flight(self) -> list[float]:
        figures = self.served.metrics()
        gauges = ("requests_in_flight", "num_requests_running", "num_requests_waiting")
        return [figures[name] for name in gauges]
