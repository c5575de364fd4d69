import random

import pytest

from twolane.server.admission import Admission
from twolane.server.http.errors import ApiError


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
    admission = Admission(100, clock)
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
    admission = Admission(1000, clock)
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


def test_broken_off_requests_do_not_count_as_served():
    admission = Admission(10)
    admission.enter(5)
    admission.leave(served=False)
    assert (admission.waiting, admission.retry_after()) == (4, 1)
