"""What a running server counts, and whether it adds up."""

import asyncio
import json
import random
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import aiohttp
import pytest

from twolane.engine.messages import Refused, Stats
from twolane.frontend.liveness import Liveness
from twolane.server.ops.dashboard.history import value_of
from twolane.server.ops.metrics import (
    MAX_ADAPTERS,
    MAX_MESSAGE_LENGTH,
    OTHER_ADAPTERS,
    RequestMetrics,
    ServerMetrics,
)
from twolane.server.service.accounting import RequestAccounting
from twolane.server.service.admission import Admission
from twolane.server.service.availability import Availability
from twolane.slo import Slo

from .serving import PATIENCE, serving, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "metrics.md"
DUMMY = ("--load-format", "dummy", "--kv-tokens", "20000")
KEY = {"Authorization": "Bearer key"}
PATHS = ("/v1/completions", "/v1/chat/completions")


def series(served):
    """Return {name: {labels: value}} of all series."""
    figures: dict[str, dict[frozenset, float]] = {}
    for line in served.request("/metrics")[2].splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([\w:]+)(?:{(.*)})? (\S+)", line).groups()
            found = frozenset(re.findall(r'(\w+)="([^"]*)"', labels or ""))
            figures.setdefault(name.removeprefix("twolane:"), {})[found] = float(value)
    return figures


def by(figures, name, label):
    """Return a family's values by one of its labels, where there are any."""
    return Counter(
        {
            dict(labels)[label]: int(value)
            for labels, value in figures.get(name, {}).items()
            if value
        }
    )


def total(figures, name):
    return sum(figures.get(name, {}).values())


def balance(figures):
    """Return requests in, and requests accounted for."""
    ends = ("request_success_total", "requests_refused_total", "requests_aborted_total")
    accounted = sum(total(figures, name) for name in (*ends, "requests_in_flight"))
    return total(figures, "requests_received_total"), accounted


def idle(served):
    """Return the figures once nothing is in flight."""
    return wait_for(
        lambda: (
            (figures := series(served)) and total(figures, "requests_in_flight") == 0 and figures
        )
    )


def grown(served, before):
    """Return by how much each family has grown, over all labels, once nothing is in flight."""
    after = idle(served)
    return {name: total(after, name) - total(before, name) for name in after}


class Traffic:
    """Calls of every kind, and what should have become of each."""

    def __init__(self, served, seed):
        self.base = served.base
        self.address = urllib.parse.urlsplit(served.base)
        self.rng = random.Random(seed)
        self.requests = 0
        self.statuses: Counter[int] = Counter()
        self.left = 0
        self.left_served = 0
        """Of those, the ones that may have been answered unread."""

    async def run(self, count):
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self.base, connector=connector, headers=KEY) as self.session,
            asyncio.TaskGroup() as group,
        ):
            await self.crowd(9)
            for _ in range(count):
                group.create_task(self.rng.choice(self.KINDS)(self))
                await asyncio.sleep(self.rng.expovariate(100))

    async def post(self, data, answers=1, path=PATHS[0], **headers):
        headers = {"Content-Type": "application/json", **headers}
        async with self.session.post(path, data=data, headers=headers) as response:
            await response.read()
            self.requests += answers if response.status == 200 else 1
            self.statuses[response.status] += 1

    def body(self, **more):
        prompt = [self.rng.randrange(3, 100) for _ in range(self.rng.randint(1, 60))]
        fields = {"prompt": prompt, "max_tokens": self.rng.randint(1, 12), "ignore_eos": True}
        return json.dumps({**fields, **more})

    async def good(self):
        await self.post(self.body(stream=self.rng.random() < 0.5))

    async def several(self):
        prompts = [[self.rng.randrange(3, 100)] for _ in range(self.rng.randint(1, 3))]
        n = self.rng.randint(1, 2)
        await self.post(self.body(prompt=prompts, n=n), n * len(prompts))

    async def wrong(self):
        bad = ({"nope": 1}, {"temperature": -1}, {"model": "x"}, {"prompt": [999]}, {"prompt": []})
        await self.post(self.body(**self.rng.choice(bad)))

    async def broken(self):
        data = self.rng.choice([b"", b"{", b"[]", b"\xff", b"null"])
        await self.post(data, path=self.rng.choice(PATHS))

    async def without_key(self):
        await self.post(self.body(), Authorization="Bearer wrong")

    async def too_large(self):
        await self.post(b" " * 6000)

    async def not_json(self):
        await self.post(self.body(), **{"Content-Type": "text/plain"})

    async def begin(self, data, length):
        """Send the begin of a body on a connection of its own: the server has it, however soon it
        is left."""
        reader, writer = await asyncio.open_connection(self.address.hostname, self.address.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (length, data)
        )
        await writer.drain()
        self.requests += 1
        return reader, writer

    async def leaves_while_sending(self):
        _, writer = await self.begin(b'{"prompt": ', 500)
        await asyncio.sleep(0.05)
        writer.close()
        self.left += 1

    async def leaves_while_served(self):
        """Leave before the answer is whole, in a stream or not."""
        body = self.body(max_tokens=15_000, stream=self.rng.random() < 0.5).encode()
        reader, writer = await self.begin(body, len(body))
        try:
            async with asyncio.timeout(self.rng.uniform(0.05, 0.4)):
                status = int((await reader.readline()).split()[1])
                if status != 200:
                    self.statuses[status] += 1
                    return
                await reader.read()
        except TimeoutError:
            self.left += 1
            self.left_served += 1
        finally:
            writer.close()

    async def crowd(self, count):
        """Ask for more long answers at once than there are places, until somebody is refused."""
        body = self.body(max_tokens=15_000, stream=True).encode()
        opened = [await self.begin(body, len(body)) for _ in range(count)]
        heads = [asyncio.create_task(reader.readline()) for reader, _ in opened]
        for head in asyncio.as_completed(heads):
            if b" 429 " in await head:
                break
        for head, (_, writer) in zip(heads, opened, strict=True):
            writer.close()
            if head.done() and b" 429 " in head.result():
                self.statuses[429] += 1
            else:
                head.cancel()
                self.left += 1
                self.left_served += 1

    async def not_a_call(self):
        async with self.session.get(self.rng.choice([*PATHS, "/nowhere", "/health"])) as response:
            await response.read()

    KINDS = (
        *(good, good, good, several, wrong, broken, not_json, without_key, too_large),
        *(leaves_while_sending, leaves_while_served, not_a_call),
    )


def check_vllm_names(figures):
    """Compare each series under a name of vLLM with ours in the same scrape; return how many."""
    ends = total(figures, "request_success_total") + total(figures, "requests_aborted_total")
    assert total(figures, "vllm:request_success_total") == ends
    compared = 0
    for name in figures.keys() & {f"vllm:{name}" for name in figures}:
        if name != "vllm:request_success_total":
            theirs = {labels - {("engine", "0")}: value for labels, value in figures[name].items()}
            assert theirs == figures[name.removeprefix("vllm:")]
            compared += len(theirs)
    return compared


def test_random_traffic_adds_up_at_every_moment(tiny_model):
    bounds = ("--max-queue", "4", "--max-running", "4", "--max-body-bytes", "5000")  # 8 places
    options = (*bounds, "--api-key", "key", "--metrics-prefix", "both")
    with serving(str(tiny_model), *DUMMY, *options) as served:
        traffic = Traffic(served, seed=1)
        working = threading.Thread(target=lambda: asyncio.run(traffic.run(250)))
        working.start()
        while working.is_alive():
            figures = series(served)
            received, accounted = balance(figures)
            assert received == accounted
            check_vllm_names(figures)
            time.sleep(0.05)
        working.join()
        figures = idle(served)
        received, accounted = balance(figures)
        assert received == accounted == traffic.requests
        assert check_vllm_names(figures) > 100
        assert total(figures, "vllm:generation_tokens_total") > 0

        # Who left may have been refused by then, without having read it.
        unread = sum(by(figures, "requests_refused_total", "reason").values()) - sum(
            n for status, n in traffic.statuses.items() if status != 200
        )
        assert 0 <= unread <= traffic.left_served
        aborted = by(figures, "requests_aborted_total", "reason")
        assert aborted == {"disconnect": traffic.left - unread}
        reasons = by(figures, "requests_refused_total", "reason")
        assert reasons["queue_full"] == traffic.statuses[429] + unread > 0
        assert reasons["model_not_found"] == traffic.statuses[404] > 0
        assert reasons["invalid_api_key"] == traffic.statuses[401] > 0
        assert traffic.statuses[413] > 0
        assert reasons["invalid_json"] > 0
        assert not reasons.keys() & {"http_500", "internal_error"}

        statuses = Counter()
        for labels, count in figures["http_requests_total"].items():
            label = dict(labels)
            if label["method"] == "POST":
                assert label["handler"] in PATHS
                statuses[int(label["status"])] += int(count)
        # 499: the client left before there was an answer; a stream had its 200 by then.
        gone, streams = statuses.pop(499), statuses[200] - traffic.statuses[200]
        assert gone + streams == aborted["disconnect"]
        statuses -= Counter({200: streams, 429: unread})
        assert statuses == traffic.statuses


def raw(served, *parts):
    """Send bytes on a connection of its own; return the status of the answer."""
    address = urllib.parse.urlsplit(served.base)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        for part in parts:
            connection.sendall(part)
        return int(connection.makefile("rb").readline().split()[1])


def test_what_the_connection_refuses_is_counted_as_answered(tiny_model):
    """A body that is no HTTP or too slow is refused, whatever the endpoint makes of its end."""
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    malformed = head + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n"
    slow = head + b"Content-Length: 500\r\n\r\n{"
    with serving(str(tiny_model), *DUMMY, "--arrival-seconds", "2") as served:
        statuses, paths = ("400", "408"), ("/v1/completions", "/tokenize")
        asked = [what % path.encode() for what in (malformed, slow) for path in paths]
        with ThreadPoolExecutor(len(asked)) as threads:
            answered = list(threads.map(partial(raw, served), asked))
        assert answered == [400, 400, 408, 408]
        expected = {(path, status): 1 for path in paths for status in statuses}

        def counted():
            return {
                (dict(labels)["handler"], dict(labels)["status"]): value
                for labels, value in series(served)["http_requests_total"].items()
                if dict(labels)["method"] == "POST"
            }

        wait_for(lambda: counted() == expected)  # endpoints hear of it after the client does
        figures = idle(served)
        assert by(figures, "requests_refused_total", "reason") == {
            "invalid_http": 1,
            "request_timeout": 1,
        }
        assert total(figures, "requests_aborted_total") == 0


def test_every_page_has_its_handler(tiny):
    """Only what has no route is `none`, by whatever path it was asked for."""
    pages = ("/docs", "/openapi.json", "/dashboard", "/nowhere", "/nowhere/else")

    def handlers():
        return {dict(labels)["handler"] for labels in series(tiny)["http_requests_total"]}

    for page in pages:
        tiny.request(page)
    assert handlers() >= {"/docs", "/openapi.json", "/dashboard", "none"}
    assert not handlers() & {"/nowhere", "/nowhere/else"}


def test_histograms_hold_what_finished(tiny):
    before = idle(tiny)
    for tokens in (1, 2, 7):
        body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
        assert tiny.request("/v1/completions", body)[0] == 200
    figures = grown(tiny, before)
    assert figures["generation_tokens_total"] == 10
    assert figures["prompt_tokens_total"] == 9
    counts = {
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 7,
        "request_time_per_output_token_seconds": 2,  # one token has no time between tokens
        "e2e_request_latency_seconds": 3,
        "request_queue_time_seconds": 3,
        "request_prefill_time_seconds": 3,
        "request_decode_time_seconds": 3,
        "request_inference_time_seconds": 3,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
    }
    assert {name: figures[f"{name}_count"] for name in counts} == counts
    assert figures["request_generation_tokens_sum"] == 10
    seconds = {name: figures[f"{name}_sum"] for name in counts if name.endswith("seconds")}
    e2e = seconds["e2e_request_latency_seconds"]
    between = seconds["inter_token_latency_seconds"]
    assert seconds["time_to_first_token_seconds"] + between == pytest.approx(e2e)
    inside = sum(seconds[f"request_{part}_time_seconds"] for part in ("queue", "inference"))
    assert 0 < inside <= e2e


def test_lanes_are_busy_no_longer_than_there_was_time(tiny):
    before = idle(tiny)
    began = time.monotonic()
    body = {"prompt": [5] * 200, "max_tokens": 200, "ignore_eos": True}
    assert tiny.request("/v1/completions", body)[0] == 200
    busy = grown(tiny, before)["lane_busy_seconds_total"]
    assert 0 < busy <= 2 * (time.monotonic() - began)
    lanes = {dict(labels)["lane"] for labels in idle(tiny)["lane_busy_seconds_total"]}
    assert lanes <= {"prefill", "decode", "device"}


def test_metrics_are_in_the_format_that_every_scraper_reads(tiny):
    headers = tiny.request("/metrics")[1]
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_nothing_is_created_and_buckets_are_fine_enough(tiny):
    text = tiny.request("/metrics")[2]
    assert "_created" not in text
    for name, first in (("time_to_first_token", 0.001), ("inter_token_latency", 0.002)):
        found = re.findall(rf'{name}_seconds_bucket{{le="([\d.]+)"', text)
        bounds = [float(bound) for bound in found]
        assert bounds[0] == first
        assert {0.008, 0.009, 0.01, 0.011, 0.012} <= set(bounds)


def test_the_page_defines_what_there_is(tiny):
    shown = set(re.findall(r"# TYPE (\S+) (\w+)", tiny.request("/metrics")[2]))
    defined = set(re.findall(r"^\| `(\S+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE))
    assert shown == {row for row in defined if not row[0].startswith("twolane:fleet_")}


@pytest.fixture
def metrics():
    """Of a server whose requests have a TTFT bound that grows with the prompt, and a TBT bound."""
    slo = Slo(ttft=1.0, ttft_per_token=0.01, tbt=0.1)
    return ServerMetrics(Stats, Liveness(), "model", slo, 16)


def judged(metrics):
    """How many requests met and missed each bound."""
    ends = product(("ttft", "tbt"), ("met", "missed"))
    return {end: int(count) for end in ends if (count := value_of(metrics.slo_requests(*end)))}


@pytest.mark.parametrize(
    ("cached", "now", "ends"),
    [
        (0, 1.05, {("ttft", "met"): 1, ("tbt", "met"): 1}),
        (8, 1.05, {("ttft", "missed"): 1, ("tbt", "met"): 1}),  # 1.02 s for two tokens
        (0, 1.15, {("ttft", "missed"): 1, ("tbt", "met"): 1}),
    ],
)
def test_a_first_token_is_judged_by_what_the_cache_lacked(metrics, cached, now, ends):
    request = RequestMetrics(metrics, 0.0, 10, metrics.slo)
    request.tokens(2, now, cached)
    request.finish("length", 9.0, None)
    assert judged(metrics) == ends


@pytest.mark.parametrize(
    ("first", "left", "ends"),
    [
        (None, 0.5, {}),
        (None, 1.2, {("ttft", "missed"): 1}),
        (0.5, 0.55, {("ttft", "met"): 1}),
        (0.5, 0.7, {("ttft", "met"): 1, ("tbt", "missed"): 1}),  # 0.2 s without a token
    ],
)
def test_what_was_late_when_the_client_left_is_missed(metrics, first, left, ends):
    request = RequestMetrics(metrics, 0.0, 10, metrics.slo)
    if first is not None:
        request.tokens(1, first, 0)
    request.give_up("disconnect", left)
    assert judged(metrics) == ends


def test_only_a_good_request_that_is_refused_misses_its_bounds(metrics):
    for overload in (False, True):
        request = RequestMetrics(metrics, 0.0, 10, metrics.slo)
        request.refuse("code", "why " * 100, overload=overload)
    assert judged(metrics) == {("ttft", "missed"): 1, ("tbt", "missed"): 1}
    [group] = metrics.refusals
    assert (group.count, len(group.message)) == (2, MAX_MESSAGE_LENGTH)


def by_adapter(metrics):
    """Requests by the label of their adapter, as Prometheus gets them."""
    return {
        sample.labels["adapter"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "twolane:adapter_requests_total"
    }


def test_adapters_beyond_the_first_share_a_label(metrics):
    names = [str(i) for i in range(MAX_ADAPTERS + 2)]
    for name in (*names, names[0]):
        metrics.count_adapter(name, 1)
    found = by_adapter(metrics)
    assert len(found) == MAX_ADAPTERS + 1
    assert [found[name] for name in (names[0], names[1], OTHER_ADAPTERS)] == [2, 1, 2]


def test_the_count_of_an_adapter_goes_on_when_it_is_loaded_again(metrics):
    metrics.count_adapter("one", 2)
    metrics.forget_adapter("one")
    metrics.forget_adapter("that nobody asked")
    assert by_adapter(metrics) == {"one": 2}
    metrics.count_adapter("one", 1)
    assert by_adapter(metrics) == {"one": 3}


def test_labels_of_unloaded_adapters_are_taken_by_new_ones(metrics):
    """A server that loads and unloads new names for ever has no more series, and no sum falls."""
    metrics.count_adapter("kept", 1)
    names = [f"adapter {i}" for i in range(2 * MAX_ADAPTERS)]
    for i, name in enumerate(names):
        metrics.count_adapter(name, 2)
        metrics.forget_adapter(name)
        assert sum(by_adapter(metrics).values()) == 2 * i + 3
    found = by_adapter(metrics)
    assert len(found) == MAX_ADAPTERS + 1
    assert found["kept"] == 1
    assert names[0] not in found
    assert found[names[-1]] == 2


def test_series_that_are_known_begin_at_zero():
    """Otherwise the attainment of a server that is always late would be no data, and not 0."""
    metrics = ServerMetrics(Stats, Liveness(), "model", Slo(ttft=1.0, tbt=1.0), 16)
    names = ("slo_requests", "slo_gaps", "request_success", "requests_aborted")
    found = {
        (name, *(value for key, value in sorted(sample.labels.items()) if key != "model_name")): (
            sample.value
        )
        for name in names
        for family in metrics.registry.restricted_registry([f"twolane:{name}_total"]).collect()
        for sample in family.samples
    }
    known = [
        ("slo_requests", outcome, slo) for outcome in ("met", "missed") for slo in ("ttft", "tbt")
    ]
    known += [("slo_gaps", "met"), ("slo_gaps", "missed")]
    known += [("request_success", reason) for reason in ("stop", "length")]
    reasons = ("disconnect", "engine", "model", "shutdown")
    known += [("requests_aborted", reason) for reason in reasons]
    assert found == dict.fromkeys(known, 0.0)


class TestSlo:
    """Attainment, with bounds that are met or missed for certain."""

    def outcomes(self, served):
        figures = idle(served).get("slo_requests_total", {})
        return {
            (dict(labels)["slo"], dict(labels)["outcome"]): int(value)
            for labels, value in figures.items()
            if value
        }

    def test_defaults_are_judged(self, tiny_model):
        ttft = ("--slo-ttft-ms", "0.0001", "--slo-ttft-per-1k-ms", "6e7")  # two minutes for two
        bounds = (*ttft, "--slo-tbt-ms", "0.0001", "--slo-tpot-ms", "60000")
        with serving(str(tiny_model), *DUMMY, *bounds) as served:
            body = {"prompt": [5, 6], "max_tokens": 5, "ignore_eos": True}
            served.request("/v1/completions", body)
            assert self.outcomes(served) == {
                ("ttft", "met"): 1,
                ("tbt", "missed"): 1,
                ("tpot", "met"): 1,
            }
            gaps = by(series(served), "slo_gaps_total", "outcome")
            assert gaps.total() == 4
            assert gaps["missed"] >= 1
            served.request("/v1/completions", {"prompt": [5, 6], "max_tokens": 1})
            assert self.outcomes(served)["tbt", "met"] == 1  # no gap, none too long
            served.request("/v1/completions", {"prompt": [5, 6], "nope": 1})
            assert sum(self.outcomes(served).values()) == 6  # the client's mistake counts nowhere

    def test_headers_of_gateways_are_bounds_and_the_tighter_one_holds(self, tiny):
        def ask(**bounds):
            before = Counter(self.outcomes(tiny))
            headers = {f"x-{name.replace('_', '-')}-ms": value for name, value in bounds.items()}
            data = json.dumps({"prompt": [5, 6], "max_tokens": 5, "ignore_eos": True}).encode()
            headers = {**headers, "Content-Type": "application/json"}
            request = urllib.request.Request(f"{tiny.base}/v1/completions", data, headers)
            urllib.request.urlopen(request, timeout=60).close()
            return Counter(self.outcomes(tiny)) - before

        assert ask(llm_d_slo_ttft="600000", llm_d_slo_tpot="0.0001") == {
            ("ttft", "met"): 1,
            ("tpot", "missed"): 1,
        }
        assert ask(slo_ttft="600000", llm_d_slo_ttft="0.0001") == {("ttft", "missed"): 1}
        assert ask(slo_tpot="0.0001", llm_d_slo_tpot="600000") == {("tpot", "missed"): 1}

    def test_who_was_not_served_was_missed(self, tiny_model):
        bounds = (
            "--slo-ttft-ms",
            "1",
            "--no-refuse-late",
            "--max-running",
            "1",
            "--max-queue",
            "1",
        )
        with serving(str(tiny_model), *DUMMY, *bounds) as served:
            address = urllib.parse.urlsplit(served.base)
            body = json.dumps({"prompt": [5], "max_tokens": 15_000, "ignore_eos": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += b"Content-Length: %d\r\n\r\n" % len(body)
            running = socket.create_connection((address.hostname, address.port))
            running.sendall(head + body)
            wait_for(lambda: served.metrics()["time_to_first_token_seconds_count"] == 1)
            waiting = socket.create_connection((address.hostname, address.port))
            waiting.sendall(head + body)
            wait_for(lambda: served.metrics()["requests_in_flight"] == 2)
            for stream in (True, False):
                asked = {**json.loads(body), "stream": stream}
                status, headers, refused = served.request("/v1/completions", asked)
                assert (status, refused["error"]["code"]) == (429, "queue_full")
                assert int(headers["Retry-After"]) >= 1
            time.sleep(0.05)
            waiting.close()
            wait_for(lambda: served.metrics()["requests_in_flight"] == 1)
            running.close()
            outcomes = self.outcomes(served)
            # Two were refused, one left before its first token, which was late by then. The one
            # that was served has a first token, whichever way it is judged.
            assert outcomes.pop(("ttft", "missed")) + outcomes.pop(("ttft", "met"), 0) == 4
            assert not outcomes

    @pytest.mark.parametrize(("code", "missed"), [("refused", 1), ("too_long", 0), ("invalid", 0)])
    def test_who_was_refused_by_the_system_was_missed(self, code, missed):
        """A system refuses good requests that would be late; the engine refuses bad ones."""
        metrics = ServerMetrics(Stats, Liveness(), "model", Slo(ttft=1.0, tbt=1.0), 16)
        admission = Admission(1)
        admission.enter(1, "prompt")
        account = RequestAccounting(admission, Availability(None), [[5]], metrics.begin_call())
        account.ended(0, Refused("r", code, "why"), time.monotonic())
        for slo in ("ttft", "tbt"):
            labels = {"model_name": "model", "slo": slo, "outcome": "missed"}
            value = metrics.registry.get_sample_value("twolane:slo_requests_total", labels)
            assert value == missed
