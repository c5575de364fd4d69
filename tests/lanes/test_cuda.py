"""What of the lanes on a GPU needs none."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from twolane.kernels.sampling import MAX_BANNED, pack_params
from twolane.lanes.cuda import clock
from twolane.lanes.cuda.slots import _packed
from twolane.lanes.work import Sampling
from twolane.sampling import SamplingParams


@pytest.mark.parametrize("count", [0, MAX_BANNED - 1, MAX_BANNED, 100])
def test_a_slot_bans_as_many_as_it_can(count: int) -> None:
    """More are banned outside of the graph (`Extras`): a request may have any number."""
    params = SamplingParams(stop_token_ids=tuple(range(10, 10 + count)), min_tokens=3)
    known = Sampling(params, seed=0, prompt_tokens=5, eos_token_ids=(2,), tokens=[1] * 5)
    banned = (2, *params.stop_token_ids) if count < MAX_BANNED else ()
    assert np.array_equal(_packed(known), pack_params(temperature=1.0, limit=8, banned=banned))


class Device:
    """A clock that the test moves, and events that happen when the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self, at: float | None = None, timing: bool = True) -> Any:
        event = SimpleNamespace(at=at, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event


@pytest.mark.parametrize("idle", [0.1, 10.0, 300.0])
def test_a_launch_after_an_idle_time_takes_what_it_takes(
    idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its begin is looked at 3 ms late, and the clocks may have parted by as much."""
    device = Device()
    monkeypatch.setattr(clock, "new_event", device.event)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: device.now))
    here = clock.DeviceClock()
    for at in (1.0, 1.0 + idle):
        begun, ended = device.event(at), device.event(at + 0.004)
        device.now = at + 0.003
        here.seen(begun)
        device.now = at + 0.00402
        assert here.both(begun, ended) == pytest.approx((at, at + 0.004), abs=3e-5)
