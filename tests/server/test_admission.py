import random

import pytest

from twolane.server.http.errors import ApiError
from twolane.server.service.admission import Admission


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_bound_is_exact():
    admission = Admission(3)
    for _ in range(3):
        admission.enter()
    with pytest.raises(ApiError) as refusal:
        admission.enter()
    assert refusal.value.status_code == 429
    assert refusal.value.headers == {"Retry-After": "1"}
    admission.leave(served=True)
    admission.enter()
    assert admission.waiting == 3


def test_several_prompts_enter_together_or_not_at_all():
    admission = Admission(3)
    admission.enter(2)
    with pytest.raises(ApiError):
        admission.enter(2)
    assert admission.waiting == 2
    with pytest.raises(ApiError) as never:
        admission.enter(4, "n")
    assert (never.value.status_code, never.value.param) == (400, "n")


def test_retry_after_is_the_time_to_serve_the_queue():
    clock = Clock()
    admission = Admission(100, clock=clock)
    admission.enter(40)
    for second in range(1, 11):
        clock.now = float(second)
        admission.leave(served=True)
    assert admission.waiting == 30
    assert admission.retry_after() == 30  # 10 first tokens in 10 seconds
    clock.now = 1000.0  # nothing moves any more
    assert admission.retry_after() == 60


def test_retry_after_is_honest_at_any_rate_and_after_any_pause():
    rng = random.Random(0)
    clock = Clock()
    admission = Admission(1000, clock=clock)
    for seconds in (0.01, 0.2, 0.03):
        admission.enter(200)
        for _ in range(100):
            clock.now += rng.expovariate(1 / seconds)
            admission.leave(served=True)
        promised, begun = admission.retry_after(), clock.now
        while admission.waiting:
            clock.now += rng.expovariate(1 / seconds)
            admission.leave(served=True)
        assert promised == pytest.approx(clock.now - begun, rel=0.3, abs=1.5)
        clock.now += 3600.0


def queue_of(count):
    """A queue of prompts of one token, each of which the engine is predicted to take a second."""
    clock = Clock()
    admission = Admission(1000, token_seconds=lambda: 1.0, clock=clock)
    admission.enter(count, tokens=count)
    return admission, clock


def serve(admission, clock, count, seconds, *, served=True):
    for _ in range(count):
        clock.now += seconds
        admission.leave(served=served, tokens=1)


def test_eight_first_tokens_of_a_queue_tell_its_rate():
    admission, clock = queue_of(28)
    serve(admission, clock, 7, 0.5)
    assert admission.retry_after() == 21  # predicted
    serve(admission, clock, 1, 0.5)
    assert admission.retry_after() == 10  # 20 requests, each in half a second
    admission.enter(20, tokens=20)
    assert admission.retry_after() == 20  # who comes while others wait changes no rate


def test_the_rate_is_that_of_the_last_64_first_tokens():
    admission, clock = queue_of(364)
    serve(admission, clock, 200, 1.0)
    serve(admission, clock, 64, 0.25)
    assert admission.retry_after() == 25  # of 100


def test_the_next_queue_has_no_rate_yet():
    admission, clock = queue_of(9)
    serve(admission, clock, 9, 0.1)
    admission.enter(50, tokens=50)
    assert admission.retry_after() == 50


def test_broken_off_requests_do_not_count_as_served():
    admission, clock = queue_of(30)
    serve(admission, clock, 10, 0.1, served=False)
    assert (admission.waiting, admission.retry_after()) == (20, 20)


def test_retry_after_of_a_burst_is_not_that_of_single_requests():
    """Single requests are served in 0.1 s each, a burst in a tenth of that for each."""
    clock = Clock()
    admission = Admission(1000, token_seconds=lambda: 1e-4, clock=clock)
    for _ in range(100):
        admission.enter(tokens=100)
        clock.now += 0.1
        admission.leave(served=True, tokens=100)
        clock.now += 1.0
    for _ in range(500):
        admission.enter(tokens=100)
    assert admission.retry_after() == 5  # by the engine: 50,000 tokens
    for _ in range(100):
        clock.now += 0.02
        admission.leave(served=True, tokens=100)
    assert admission.retry_after() == 8  # by this queue: 400 at 50 a second


def test_a_key_may_fill_its_own_share_alone():
    admission = Admission(10, 3)
    for _ in range(3):
        admission.enter(key=0)
    with pytest.raises(ApiError) as refusal:
        admission.enter(key=0)
    assert (refusal.value.status_code, refusal.value.code) == (429, "key_queue_full")
    admission.enter(3, key=1)
    with pytest.raises(ApiError) as never:
        admission.enter(4, "n", key=2)
    assert (never.value.status_code, never.value.param) == (400, "n")
    admission.leave(served=True, key=0)
    admission.enter(key=0)
    assert admission.waiting == 6
    with pytest.raises(ApiError):  # who has left gave one place back
        admission.enter(key=0)
