import pytest

from twolane.api.admission import Admission
from twolane.api.errors import ApiError


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
        admission.enter(4)
    assert never.value.status_code == 400


def test_retry_after_is_the_time_to_serve_the_queue():
    now = 0.0
    admission = Admission(100, clock=lambda: now)
    admission.enter(40)
    for second in range(10):
        now = float(second)
        admission.leave(served=True)
    assert admission.waiting == 30
    assert admission.retry_after() == 27  # 10 first tokens in 9 seconds
    now = 1000.0
    assert admission.retry_after() == 60


def test_broken_off_requests_do_not_count_as_served():
    admission = Admission(10)
    admission.enter(5)
    admission.leave(served=False)
    assert (admission.waiting, admission.retry_after()) == (4, 1)
