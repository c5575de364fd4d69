"""The seconds of a start, by stage."""

import time

from twolane.devices import StartTimes


def test_each_stage_of_a_start_has_the_seconds_until_the_next_one() -> None:
    told: list[tuple[str, float]] = []
    times = StartTimes(time.monotonic() - 7.0, lambda *step: told.append(step))
    for step in (("weights", 0.0), ("weights", 1.0), ("kernels", 0.0), ("graphs", 0.0)):
        times(*step)
    times("kernels", 0.5)  # a stage may come back
    time.sleep(0.02)
    line = times.end()
    assert told == [
        ("weights", 0.0), ("weights", 1.0), ("kernels", 0.0), ("graphs", 0.0), ("kernels", 0.5)
    ]  # fmt: skip
    assert list(times.seconds) == ["imports", "settings", "weights", "kernels", "graphs"]
    assert times.seconds["imports"] >= 7.0
    assert times.seconds["kernels"] >= 0.02
    assert line.startswith(f"started in {sum(times.seconds.values()):.1f} s: imports 7.0, settings")
