"""Requests that would be late are refused before they wait, whatever the system."""

import http.client
import json
import random
import urllib.parse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from twolane.engine.messages import Stats
from twolane.engine.prompt_work import PromptPace, PromptWork, WaitingPrompt
from twolane.server.http.errors import ApiError
from twolane.server.http.slo_headers import names_ttft
from twolane.server.service.admission import Admission
from twolane.server.service.late_guard import ArrivingRequests, Expected, LateGuard
from twolane.slo import Slo

from .serving import PATIENCE

PACE = PromptPace(token=1e-3)
SLO = Slo(ttft=0.5)


class Queue:
    """An engine in which so many tokens wait; its system serves them in order."""

    stats_at = 100.0

    def __init__(self, tokens: int, pace: PromptPace = PACE) -> None:
        self.stats, self._work = Stats(prompt_pace=pace), PromptWork(1, tokens, 0)

    def queued(self) -> PromptWork:
        return self._work


def guard(waiting: dict[int | None, int], pace: PromptPace = PACE, *, on: bool = True) -> LateGuard:
    """A guard of a server where each key has so many tokens waiting."""
    admission = Admission(1000)
    for key, tokens in waiting.items():
        if tokens:
            admission.enter(key=key, tokens=tokens)
    return LateGuard(Queue(sum(waiting.values()), pace), admission, on=on)


class Asked(SimpleNamespace):
    """A call, which is no other."""

    __hash__ = object.__hash__


def call(
    key: int | None = None, slo: Slo = SLO, waited: float = 0.0, length: int | None = None
) -> Asked:
    headers = {} if length is None else {"content-length": str(length)}
    return Asked(arrival=100.0 - waited, key=key, slo=slo, headers=headers)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops the clock at 100 s; call it to set another time."""

    def stop(at: float) -> None:
        monkeypatch.setattr("twolane.server.service.late_guard.time.monotonic", lambda: at)

    stop(100.0)
    return stop


def refuses(made: LateGuard, tokens: int, asked: Asked, reused: int = 0) -> bool:
    try:
        made.check([[1] * tokens], asked, lambda prompt: reused)
    except ApiError as error:
        assert (error.status_code, error.code) == (429, "overloaded")
        assert int(error.headers["Retry-After"]) >= 1
        return True
    return False


@pytest.mark.usefixtures("still")
def test_the_bound_is_kept_to_by_queue_and_own_prompt() -> None:
    assert not refuses(guard({None: 400}), 99, call())
    assert refuses(guard({None: 400}), 101, call())
    assert refuses(guard({None: 400}), 99, call(waited=0.1))
    assert not refuses(guard({None: 400}), 300, call(), reused=250)
    assert not refuses(guard({None: 400}), 300, call(slo=Slo(ttft=0.5, ttft_per_token=1e-3)))


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(
    ("waiting", "asked", "pace", "on"),
    [
        ({None: 0}, call(), PACE, True),
        ({None: 9000}, call(slo=Slo()), PACE, True),
        ({None: 9000}, call(), PromptPace(), True),
        ({None: 9000}, call(), PACE, False),
    ],
    ids=["nothing waits", "no bound", "pace not known", "off"],
)
def test_nothing_else_is_refused(waiting, asked, pace, on) -> None:
    made = guard(waiting, pace, on=on)
    made.check_arrival({"content-length": "9"}, asked, None)
    assert not refuses(made, 5000, asked)


@pytest.mark.usefixtures("still")
def test_a_key_waits_for_no_more_of_another_key_than_it_brings() -> None:
    made = guard({1: 5000})
    assert refuses(made, 100, call(1))
    assert not refuses(made, 100, call(2))
    assert refuses(made, 300, call(2))


@pytest.mark.usefixtures("still")
def test_the_queue_alone_refuses_by_the_headers() -> None:
    made = guard({None: 600})
    with pytest.raises(ApiError) as refusal:
        made.check_arrival({"content-length": "900"}, call(), None)
    assert refusal.value.status_code == 429
    made.check_arrival({"content-length": "900", "x-slo-ttft-ms": "700"}, call(), None)
    made.check_arrival({"content-length": "900"}, call(slo=Slo(ttft=0.5, ttft_per_token=1)), None)
    for wrong in ("many", "0", "-1", "nan", "inf"):  # to be sent again would help nobody
        made.check_arrival({"content-length": "900", "x-slo-ttft-ms": wrong}, call(), None)
    made.check_arrival({}, call(), None)


def unread(made: LateGuard, length: int, key: int | None = None, times: int = 16) -> int:
    """Return how many of some requests a guard refuses by the length of their bodies."""
    refused = 0
    for _ in range(times):
        try:
            made.check_arrival({"content-length": str(length)}, asked := call(key), key)
        except ApiError:
            refused += 1
        else:
            asked.slo = Slo(ttft=9.0)
            assert not refuses(made, 1, asked)  # it is read
    return refused


def test_what_late_bodies_came_to_refuses_the_next_ones_unread(still) -> None:
    made = guard({None: 450})
    assert unread(made, 500) == 0
    for tokens in (90, 110) * 4:  # 0.9 and 1.1 tokens for five bytes
        assert refuses(made, tokens, call(length=500))
    assert unread(made, 500) == 15  # the first one is read
    still(100.05)
    assert unread(made, 500) == 16
    still(100.26)
    assert unread(made, 500) == 15
    assert unread(made, 260) == 0  # 47 to 57 tokens, of which 50 are in time
    assert unread(made, 500, key=1) == 0  # of whose bodies nothing is known


def test_bodies_whose_prompts_are_cached_are_read_again(still) -> None:
    made = guard({None: 450})
    for _ in range(8):
        assert refuses(made, 100, call(length=500))
    assert unread(made, 500) == 15
    assert not refuses(made, 100, call(length=500), reused=80)
    assert unread(made, 500) == 0
    for _ in range(32):  # no later one is cached
        assert refuses(made, 100, call(length=500))
    assert unread(made, 500) == 16


def test_bodies_that_are_being_read_count_until_they_are_known(still) -> None:
    made, headers = guard({None: 450}), {"content-length": "500", "x-slo-ttft-ms": "760"}
    for _ in range(8):
        assert refuses(made, 100, call(length=500))
    read = [call() for _ in range(4)]
    for asked in read:  # in time by 210, 110 and 10 ms; the last one is only read to learn from it
        made.check_arrival(headers, asked, None)
    for _ in range(2):
        with pytest.raises(ApiError):
            made.check_head(headers, SLO, None)
    made.check_arrival(headers, call(7), 7)
    assert not refuses(made, 1, read[1])
    assert made.check_head(headers, SLO, None).tokens == 100
    made.check_arrival(headers, call(), None)
    with pytest.raises(ApiError):
        made.check_head(headers, SLO, None)
    still(101.1)
    assert made.check_head(headers, SLO, None).tokens == 100


def test_what_a_head_let_pass_is_not_checked_again_and_counts_at_once(still) -> None:
    made, headers = guard({None: 450}), {"content-length": "500", "x-slo-ttft-ms": "660"}
    for _ in range(8):
        assert refuses(made, 100, call(length=500))
    for _ in range(3):  # in time by 110 and 10 ms; the last one is only read to learn from it
        made.check_early(headers, SLO, None, 0.0)
    with pytest.raises(ApiError):
        made.check_early(headers, SLO, None, 0.0)
    for _ in range(3):
        made.check_arrival(headers, call(), None)
    with pytest.raises(ApiError):
        made.check_arrival(headers, call(), None)
    still(100.2)
    with pytest.raises(ApiError):
        made.check_early(headers, SLO, None, 0.0)
    still(101.1)
    made.check_early(headers, SLO, None, 0.0)


def test_what_arrives_is_summed_and_forgotten_after_a_second(still) -> None:
    arrivals, works = ArrivingRequests(), [PromptWork(1, tokens, 0) for tokens in (10, 20, 40)]
    for place, work in enumerate(works):
        still(100.0 + 0.4 * place)
        arrivals.add(place, work)
    assert arrivals.work.tokens == 70
    arrivals.take(1)
    arrivals.take(1)
    assert arrivals.work.tokens == 50
    still(101.3)
    assert arrivals.work.tokens == 40
    assert arrivals.take_oldest() == works[2]
    assert arrivals.take_oldest() is None
    assert arrivals.work == PromptWork()


@pytest.mark.usefixtures("still")
def test_of_many_that_come_at_once_to_an_idle_server_only_those_in_time_are_read() -> None:
    busy, headers = guard({None: 450}), {"content-length": "2000"}
    for _ in range(8):
        assert refuses(busy, 400, call(length=2000))
    made = guard({})
    made._bodies = busy._bodies
    made.check_early({"content-length": "9000"}, SLO, None, 0.0)  # alone, though it will be late
    made = guard({})
    made._bodies = busy._bodies
    made.check_early(headers, SLO, None, 0.0)
    made.check_early(headers, SLO, None, 0.0)  # read to learn from it
    for _ in range(9):
        with pytest.raises(ApiError):
            made.check_early(headers, SLO, None, 0.0)
    made.check_early(headers, Slo(), None, 0.0)  # has no bound


@pytest.mark.parametrize(
    ("line", "named"),
    [("x-slo-ttft-ms: 9", True), ("X-LLM-D-SLO-TTFT-MS:9", True), ("x-slo-tbt-ms: 9", False)],
)
def test_bounds_are_seen_in_heads_alone(line, named) -> None:
    head = f"POST / HTTP/1.1\r\n{line}\r\n\r\n".encode()
    assert names_ttft(head + b"x-slo-ttft-ms: 9") == named


@pytest.mark.usefixtures("still")
def test_a_bound_that_grows_with_the_prompt_is_kept_to_by_its_least_and_its_most() -> None:
    made = guard({None: 450})
    for _ in range(8):
        assert refuses(made, 100, call(length=500))
    headers = {"content-length": "500"}
    made.check_arrival(headers, call(), None)  # which is read all the same
    with pytest.raises(ApiError):
        made.check_arrival(headers, call(slo=Slo(ttft=0.4, ttft_per_token=1e-3)), None)
    made.check_arrival(headers, call(slo=Slo(ttft=0.4, ttft_per_token=2e-3)), None)


@pytest.mark.usefixtures("still")
def test_the_seconds_for_which_a_head_was_unread_count_to_its_bound() -> None:
    made = guard({None: 400})
    assert made.check_head({"content-length": "9"}, SLO, None, 0.08) == PromptWork()
    with pytest.raises(ApiError):
        made.check_head({"content-length": "9"}, SLO, None, 0.12)


class ByDeadline:
    """An engine that serves prompts by deadline, those first that can still be in time."""

    def __init__(self) -> None:
        self.stats, self.stats_at = Stats(), 0.0
        self.waiting: list[tuple[float, int, Callable[[float | None], None]]] = []
        """Due times, tokens and what is told of first tokens."""
        self.ends, self.ended = 0.0, list[tuple[float, float]]()
        """When the prompt ends that is computed, and due times and ends of all before it."""

    def queued(self) -> PromptWork:
        return self.stats.queued

    def serve(self, until: float, still: Callable[[float], None]) -> None:
        """Serve until a time, and publish what waits then."""
        while self.waiting and self.ends <= until:
            first = min(self.waiting, key=lambda each: (each[0] < self.ends, each[0]))
            self.waiting.remove(first)
            self.ends += PACE.token * first[1]
            self.ended.append((first[0], self.ends))
            still(self.ends)
            first[2](self.ends)
        still(until)
        self.ends, self.stats_at = max(self.ends, until), until
        tokens = sum(each[1] for each in self.waiting) + (self.ends - until) / PACE.token
        yielding = [WaitingPrompt(tokens, 0, due - until) for due, tokens, _ in self.waiting]
        work = PromptWork(len(yielding), tokens, 0)
        self.stats = Stats(prompt_pace=PACE, queued=work, yielding=yielding)


def served_by_deadline(
    load: float, per_token: float, still: Callable[[float], None]
) -> tuple[float, float]:
    """Serve 1,500 prompts of uneven lengths at this multiple of the rate that can be served, with
    bounds of so many seconds more for each token; return the fractions refused of all, and late of
    those that were not."""
    rng, now, refused = random.Random(5), 0.0, 0
    engine, admission, slo = (
        ByDeadline(),
        Admission(10_000),
        Slo(ttft=3.0, ttft_per_token=per_token),
    )
    made = LateGuard(engine, admission, on=True)
    for _ in range(1500):
        tokens = min(1000, 1 + int(rng.lognormvariate(4.0, 1.0)))  # 85 on average
        now += rng.expovariate(load / (85 * PACE.token))
        engine.serve(now, still)
        asked = Asked(arrival=now, key=None, slo=slo, headers={})
        admission.waiting = len(engine.waiting) + (engine.ends > now)
        admission._waiting_of[None] = admission.waiting
        try:
            expected = made.check([[1] * tokens], asked, lambda prompt: 0)
        except ApiError:
            refused += 1
            continue
        told = made.await_first(expected) if expected else lambda at: None
        engine.waiting.append((now + slo.first_token(tokens), tokens, told))
    engine.serve(now + 1000.0, still)
    late = sum(end > due for due, end in engine.ended)
    return refused / 1500, late / len(engine.ended)


def test_what_is_due_later_delays_no_request(still) -> None:
    made, engine = guard({None: 900}), ByDeadline()
    assert refuses(made, 100, call())
    engine.stats_at, made._engine = 100.0, engine
    long, begun = WaitingPrompt(800, 0, 0.95), PromptWork(2, 900, 0)
    engine.stats = Stats(prompt_pace=PACE, queued=begun, yielding=[long])
    assert not refuses(made, 399, call())
    assert refuses(made, 401, call())
    assert not refuses(made, 401, call(slo=Slo()))
    assert refuses(made, 100, call(slo=Slo(ttft=0.97)))


def test_a_burst_that_ends_idling_counts_before_the_engine_has_counted_it(still) -> None:
    made, engine = guard({None: 400}), ByDeadline()
    engine.stats, engine.stats_at, made._engine = Stats(prompt_pace=PACE, yielding=[]), 90.0, engine
    burst, counted = PromptWork(1, 400, 0), engine.stats
    engine.queued = lambda: counted.queued.plus(burst)
    assert refuses(made, 101, call())
    assert not refuses(made, 99, call())
    # Once it is counted, it is computed as time passes.
    engine.stats = counted = Stats(prompt_pace=PACE, queued=burst, yielding=[])
    burst, engine.stats_at = PromptWork(), 99.9
    assert not refuses(made, 199, call())
    assert refuses(made, 201, call())


def test_several_keys_take_turns_whatever_is_due_when() -> None:
    made, engine = guard({1: 900}), ByDeadline()
    work, long = PromptWork(1, 900, 0), WaitingPrompt(900, 0, 9.0)
    engine.stats = Stats(prompt_pace=PACE, queued=work, yielding=[long])
    made._engine = engine
    assert refuses(made, 300, call(2))


@pytest.mark.parametrize(
    ("load", "per_token", "refused", "late"),
    [(0.8, 0.01, 0.0, 0.0), (0.9, 0.01, 0.01, 0.01), (1.5, 0.01, 0.25, 0.15), (4.0, 0, 0.5, 0.01)],
)
def test_served_by_deadline_few_are_refused_in_vain_or_late(
    load, per_token, refused, late, still
) -> None:
    found = served_by_deadline(load, per_token, still)
    assert found[0] <= refused
    assert found[1] <= late


@pytest.mark.usefixtures("still")
def test_late_first_tokens_shorten_the_queue() -> None:
    made = guard({None: 250})
    assert not refuses(made, 50, call())
    for turn in range(10):
        made.await_first(Expected(0.3, 0.5, 100.0 + turn))(100.9 + turn)
    assert refuses(made, 50, call())


def test_a_first_token_that_is_overdue_counts_before_it_comes(still) -> None:
    """`auto` serves those last that are late already; one whose client has gone does not count."""
    made, patient = guard({None: 250}), Slo(ttft=9.0)
    for turn in range(10):
        still(100.0 + turn)
        gone, prompt = (made.await_first(Expected(0.3, 0.5, 100.0 + turn)) for _ in range(2))
        gone(None)
        prompt(100.2 + turn)
        assert not refuses(made, 1, call(slo=patient, waited=-turn))
    assert not refuses(made, 50, call(waited=-9))
    for turn in range(10, 20):
        still(100.0 + turn)
        made.await_first(Expected(0.3, 0.5, 100.0 + turn))
        assert not refuses(made, 1, call(slo=patient, waited=-turn))
    assert refuses(made, 50, call(waited=-19))


def test_a_flood_is_refused_at_once(tiny) -> None:
    address = urllib.parse.urlsplit(tiny.base).netloc
    before = tiny.metrics().get("requests_refused_total", 0)

    def ask(number: int) -> tuple[int, str | None]:
        prompt = [3 + (number * 31 + place * 7) % 120 for place in range(3000)]
        connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        headers = {"Content-Type": "application/json", "x-slo-ttft-ms": "100"}
        body = json.dumps({"prompt": prompt, "max_tokens": 2})
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        code = json.loads(answer.read()).get("error", {}).get("code")
        connection.close()
        assert answer.status == 200 or int(answer.headers["Retry-After"]) >= 1
        return answer.status, code

    for number in range(3):  # of which it learns its pace
        assert ask(number) == (200, None)
    with ThreadPoolExecutor(30) as pool:
        said = Counter(pool.map(ask, range(3, 63)))
    assert set(said) == {(200, None), (429, "overloaded")}
    assert tiny.metrics()["requests_refused_total"] - before == said[429, "overloaded"]
