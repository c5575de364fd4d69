"""The pace of prompts, learnt from what they took."""

import random

import pytest

from twolane.engine.prompt_work import UNKNOWN, PromptPace, PromptPaces, PromptWork


def learnt(pace: PromptPace, works, noise: float = 0.0) -> PromptPace:
    draw, paces = random.Random(0), PromptPaces()
    for work in works:
        paces.note(work, pace.seconds(work) * draw.uniform(1 - noise, 1 + noise))
    return paces.pace


def drawn(count: int, least: int = 8, most: int = 16_000) -> list[PromptWork]:
    draw = random.Random(1)
    return [PromptWork.of(draw.randrange(least, most), draw.randrange(8000)) for _ in range(count)]


@pytest.mark.parametrize(
    "pace",
    [
        PromptPace(token=2e-5),
        PromptPace(0.06, 2e-3),
        PromptPace(4e-3, 2e-5, 1e-9),
    ],
)
def test_prompts_of_all_lengths_are_predicted_by_one_law(pace) -> None:
    found = learnt(pace, drawn(300), noise=0.2)
    for work in (PromptWork.of(16, 0), PromptWork.of(2000, 0), PromptWork.of(16_000, 4000)):
        error = found.seconds(work) - pace.seconds(work)
        assert abs(error) < 0.15 * pace.seconds(work) + 5e-3


def test_short_remainders_do_not_make_long_prompts_look_slow() -> None:
    """A launch of eight tokens takes nearly as long as one of sixty, for it reads all weights."""
    pace = PromptPace(0.06, 1e-3)
    works = [PromptWork.of(8 if i % 4 else 264, 0 if not i % 4 else 256) for i in range(200)]
    found = learnt(pace, works)
    assert found.seconds(PromptWork.of(264, 0)) == pytest.approx(0.324, rel=0.1)
    assert found.seconds(PromptWork.of(8, 256)) == pytest.approx(0.068, rel=0.1)


def test_the_pace_follows_the_load() -> None:
    slow = [PromptWork.of(1000, 0)] * 100
    paces = PromptPaces()
    for work in slow:
        paces.note(work, 1.0)
    for work in slow:
        paces.note(work, 2.0)
    assert paces.pace.seconds(slow[0]) == pytest.approx(2.0, rel=0.1)


def test_nothing_is_known_before_the_first_prompt() -> None:
    assert not PromptPaces().pace
    assert PromptPaces().pace == UNKNOWN


def test_works_add_up() -> None:
    both = PromptWork.of(100, 0).plus(PromptWork.of(50, 200), 0.5)
    assert both == PromptWork(1.5, 125, 5000 + 25 * 225)
