"""The dashboard: its page in a real browser, and its figures against those that were put in."""

import json
import re
import signal
import socket
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twolane.engine.messages import Stats
from twolane.frontend.liveness import Liveness
from twolane.server.ops.dashboard.history import COARSE_SECONDS, History, Reader, quantile
from twolane.server.ops.dashboard.page import FILES
from twolane.server.ops.metrics import GAP_BUCKETS, START_BUCKETS, RequestMetrics, ServerMetrics
from twolane.slo import Slo

from .serving import PATIENCE, serving, wait_for

KEY = "open-sesame"
BOUND = 1.5
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def guarded(tiny_model):
    """One request runs, four wait; a first token is late after 1.5 s."""
    args = ("--load-format", "dummy", "--kv-tokens", "90000", "--api-key", KEY)
    bounds = ("--max-running", "1", "--max-queue", "4", "--slo-ttft-ms", str(BOUND * 1e3))
    with serving(str(tiny_model), *args, *bounds) as served:
        yield served


def get(served, path, key=None):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(served.base + path, None, headers)) as r:
            return r.status, r.headers, r.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_the_page_needs_no_key_and_its_data_does(guarded):
    status, headers, page = get(guarded, "/dashboard")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    linked = set(re.findall(r'(?:href|src)="dashboard/([^"]+)"', page.decode()))
    assert linked == FILES.keys() - {"dashboard.html"}
    for name in linked:
        assert get(guarded, f"/dashboard/{name}")[0] == 200
    assert get(guarded, "/")[2] == page
    assert get(guarded, "/dashboard/dashboard.py")[0] == 404
    assert get(guarded, "/dashboard/data")[0] == 401
    assert get(guarded, "/dashboard/data", "wrong")[0] == 401
    assert get(guarded, "/dashboard/data", KEY)[0] == 200
    for query in ("window=year", "after=-1", "after=x"):
        assert get(guarded, f"/dashboard/data?{query}", KEY)[0] == 400


def ask(served, tokens):
    """Open a streamed request; the socket yields nothing before its first token."""
    address = urllib.parse.urlsplit(served.base)
    body = {"prompt": [5] * 40, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    connection = socket.create_connection((address.hostname, address.port), timeout=PATIENCE)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (KEY.encode(), len(data)) + data
    )
    return connection


def shorten(patience, route):
    """Have a page's script wait for answers for so many milliseconds."""
    answer = route.fetch()
    script = answer.text()
    waits = "ANSWER_MS = 5000;"
    assert script.count(waits) == 1
    route.fulfill(response=answer, body=script.replace(waits, f"ANSWER_MS = {patience};"))


@contextmanager
def opened(served, patience=5000, **options):
    """The dashboard in a browser that reaches nothing but the server; the page waits so many
    milliseconds for an answer."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM} (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(**options)
        page.set_default_timeout(PATIENCE * 1e3)
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.route("**/dashboard/dashboard.js", partial(shorten, patience))
        page.goto(f"{served.base}/dashboard")
        yield page
        browser.close()


def test_a_burst_and_the_breach_it_causes_are_seen(guarded):
    with opened(guarded, viewport={"width": 390, "height": 844}) as page:
        page.fill("#key-text", KEY)
        page.click("text=Open")
        page.wait_for_selector("#tiles .tile")

        def holds():
            """What one of a few tokens looks like, in the seconds that count."""
            with ask(guarded, 4) as quick:
                quick.recv(1)
                page.wait_for_timeout(500)
                return page.query_selector("#verdict.met")

        wait_for(holds)
        wait_for(lambda: guarded.metrics()["requests_in_flight"] == 0)
        before = guarded.metrics()["time_to_first_token_seconds_count"]

        running = ask(guarded, 60_000)
        running.recv(1)
        burst = [ask(guarded, 60_000) for _ in range(7)]  # four wait, the others are refused
        page.wait_for_selector('.tile:has-text("Waiting") b:text-is("4")')
        page.wait_for_selector("#refusals :text('queue_full')")
        page.wait_for_timeout(BOUND * 1e3)
        check_controls(page)
        running.close()  # whoever is next has its first token too late
        wait_for(lambda: guarded.metrics()["time_to_first_token_seconds_count"] == before + 2)
        page.wait_for_selector("#verdict.missed:has-text('SLO breach: P99 TTFT')")
        page.wait_for_selector(".tile.missed:has-text('TTFT')")
        for connection in burst:
            connection.close()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert all(url.startswith(guarded.base) or url == "data:," for url in page.asked)
        assert all("401" in text for text in page.said), page.said


def test_the_page_is_dark_and_narrow_and_reached_by_the_keyboard_alone(guarded):
    look = {"color_scheme": "dark", "viewport": {"width": 320, "height": 700}}
    with opened(guarded, **look) as page:
        page.wait_for_selector("#key-text")
        for key in ("Tab", *KEY, "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("#tiles .tile")
        reached = []
        for _ in range(5):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.textContent"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert reached == ["1 s", "10 s", "Pause", "Last minute", "Last 15 minutes"]
        page.focus("#window [value=quarter]")
        page.keyboard.press("Space")
        assert page.get_attribute("#window [value=quarter]", "aria-pressed") == "true"
        back, text = (
            page.evaluate(f"getComputedStyle(document.body).{name}")
            for name in ("backgroundColor", "color")
        )
        assert brightness(back) < 80 < 180 < brightness(text)
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        assert all("401" in text for text in page.said), page.said


def brightness(colour):
    """The mean of a colour's red, green and blue, 0 to 255."""
    return np.mean([int(part) for part in re.findall(r"\d+", colour)[:3]])


@pytest.mark.full
def test_a_server_that_is_gone_looks_like_one(tiny_model):
    """Whether it answers no more or is no more; the page shows the last figures, and says so."""
    args = ("--load-format", "dummy", "--kv-tokens", "20000", "--slo-ttft-ms", "60000")
    with serving(str(tiny_model), *args) as served, opened(served, patience=1500) as page:
        page.wait_for_selector("#link:text-is('live')")
        served.request("/v1/completions", {"prompt": [5], "max_tokens": 5, "ignore_eos": True})
        page.wait_for_selector("#verdict.met")
        served.process.send_signal(signal.SIGSTOP)
        page.wait_for_selector("#verdict.missed:has-text('No connection')")
        served.process.send_signal(signal.SIGCONT)
        page.wait_for_selector("#verdict:not(.missed)")
        served.process.kill()
        page.wait_for_selector("#verdict.missed:has-text('No connection')")


def check_controls(page):
    """The lanes' picture shows what runs; buttons do what they say."""
    page.click("#zoom :text-is('1 s')")
    page.click("#window :text-is('Last 15 minutes')")
    assert page.get_attribute("#window [value=quarter]", "aria-pressed") == "true"
    assert page.get_attribute("#window [value=minute]", "aria-pressed") == "false"
    page.wait_for_function("document.querySelector('#levels').textContent.includes('decode')")
    wait_for(lambda: "decode: " in shown_launch(page))  # a starved engine has none for a moment
    said = page.inner_text("#launch")
    assert re.search(r"decode: \d+ steps for 1 requests.* on \d+ of \d+ cores", said)


def shown_launch(page):
    """What is said of a launch that the mouse comes upon while the picture is held."""
    page.click("text=Pause")
    assert page.inner_text("#pause") == "Go on"
    box = page.locator("#timeline .u-over").bounding_box()
    for part in range(1, 20):
        page.mouse.move(box["x"] + box["width"] * part / 20, box["y"] + box["height"] - 5)
    page.click("text=Go on")
    return page.inner_text("#launch")


@given(
    st.lists(st.floats(0, 700), min_size=1, max_size=60),
    st.sampled_from((0.5, 0.9, 0.99)),
    st.sampled_from((START_BUCKETS, GAP_BUCKETS)),
)
def test_quantiles_are_in_the_right_bucket(values, q, bounds):
    """That of the smallest value which a share q of the values does not exceed."""
    counts = [sum(value <= bound for value in values) for bound in bounds] + [len(values)]
    exact = np.quantile(values, q, method="inverted_cdf")
    place = np.searchsorted(bounds, exact)
    low = 0.0 if place == 0 else bounds[place - 1]
    high = bounds[min(place, len(bounds) - 1)]
    assert min(low, high) <= quantile(q, bounds, counts) <= high


def test_nothing_counted_has_no_quantile():
    assert quantile(0.5, START_BUCKETS, [0.0] * (len(START_BUCKETS) + 1)) is None


class Clock:
    """A server's history whose time the test makes."""

    def __init__(self):
        self.now = 100.0
        self.stats = Stats()
        self.metrics = ServerMetrics(lambda: self.stats, Liveness(), "model", Slo(ttft=0.5), 16)
        self.read = Reader(self.metrics, lambda: self.stats, lambda: self.now)
        self.history = History(self.read)

    def pass_(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            self.history.tick()

    def serve(self, ttft):
        self.metrics.received.inc()
        self.metrics.in_flight.inc()
        request = RequestMetrics(self.metrics, self.now, 10, self.metrics.slo)
        request.tokens(1, self.now + ttft, None)
        request.finish("stop", self.now + ttft, None)


def test_each_window_has_what_happened_in_it():
    clock = Clock()
    clock.serve(2.5)
    clock.stats = Stats(prefix_queries=10, prefix_hits=5, seconds=[("decode", 2, 30.0)])
    clock.pass_(100)
    for _ in range(3):
        clock.serve(0.1)
    clock.stats = Stats(prefix_queries=20, prefix_hits=5, seconds=[("decode", 2, 60.0)])
    clock.pass_(20)
    windows = clock.history.windows()
    assert {name: w["totals"]["received"] for name, w in windows.items()} == {
        "now": 0,
        "minute": 3,
        "quarter": 4,
    }
    assert windows["now"]["ttft"] == [None, None, None]
    assert max(windows["minute"]["ttft"]) <= 0.1 < 2 < windows["quarter"]["ttft"][2] <= 3
    assert [w["attainment"]["ttft"] for w in windows.values()] == [None, 1.0, 0.75]
    assert [w["prefix_hits"] for w in windows.values()] == [None, 0.0, 0.25]
    assert windows["minute"]["lanes"] == [("decode", 2, pytest.approx(0.5))]
    assert windows["minute"]["totals"]["prompt_tokens"] == 30


def test_the_last_seconds_begin_with_the_reading_of_that_moment():
    clock = Clock()
    clock.stats = Stats(seconds=[("decode", 1, 5.0)])
    clock.pass_(14)
    clock.serve(0.1)
    clock.pass_(6)
    windows = clock.history.windows()
    assert [windows[name]["totals"]["received"] for name in ("now", "minute")] == [0, 1]
    assert windows["now"]["lanes"] == []  # nothing has worked meanwhile


def test_readings_that_come_a_little_early_are_kept():
    clock = Clock()
    for _ in range(3):
        clock.now += 0.9
        clock.history.tick()
    assert len(clock.history.points("minute")["at"]) == 3


def test_it_shows_what_happened_since_the_last_reading():
    clock = Clock()
    clock.pass_(10)
    clock.serve(0.7)
    assert clock.history.windows()["now"]["attainment"]["ttft"] == 0.0


def test_an_idle_server_is_not_read_in_full():
    clock = Clock()
    clock.serve(0.1)
    first = clock.read()
    clock.now += 1.0
    again = clock.read()
    assert (again.totals is first.totals, again.at) == (True, clock.now)
    clock.serve(0.1)
    assert clock.read().totals["finished"] == 2
    clock.metrics.received.inc()
    clock.metrics.in_flight.inc()
    assert clock.read().totals["received"] == 3
    clock.metrics.in_flight.dec()
    clock.metrics.refuse("invalid", "it ended between two readings")
    assert clock.read().totals["refused"] == 1
    clock.stats = Stats(prefix_queries=7)
    assert clock.read().stats.prefix_queries == 7


def test_memory_is_bounded_and_charts_have_even_steps():
    clock = Clock()
    clock.pass_(1000)
    minute, quarter = (clock.history.points(window)["at"] for window in ("minute", "quarter"))
    assert (len(minute), len(quarter)) == (60, 90)
    assert minute[-1] - minute[0] == 59
    assert quarter[-1] - quarter[0] == 89 * COARSE_SECONDS


def test_refusals_in_a_row_for_one_reason_are_one_line():
    metrics = Clock().metrics
    for i in range(30):
        metrics.refuse("queue_full", f"{i} wait")
    assert [(r.reason, r.message, r.count) for r in metrics.refusals] == [
        ("queue_full", "29 wait", 30)
    ]
    for i in range(50):
        metrics.refuse(f"reason {i}", "x" * 1000)
    assert len(metrics.refusals) == 20
    assert metrics.refusals[-1].reason == "reason 49"
    assert len(metrics.refusals[-1].message) == 200
