"""When the front hands on what the engine made."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from twolane.engine.messages import Output
from twolane.frontend.delivery import QUIET_SECONDS, Playout


def play(
    use: Callable[[Playout], Coroutine[Any, Any, None]],
    hand_on: Callable[[Output], None] = lambda output: None,
) -> list[tuple[Output, float]]:
    """What was handed on, and when."""
    handed = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def take(output: Output) -> None:
            handed.append((output, loop.time()))
            hand_on(output)

        await use(Playout(take))

    asyncio.run(run())
    return handed


def output(id: str, due: float | None) -> Output:
    return Output(id, [7], due=due)


def test_each_is_handed_on_when_it_is_due_and_those_of_a_time_in_order() -> None:
    async def use(playout: Playout) -> None:
        now = asyncio.get_running_loop().time()
        for id, after in (("c", 0.05), ("a", 0.01), ("d", 0.05), ("b", 0.02)):
            playout.take([output(id, now + after)])
        await asyncio.sleep(0.1)

    handed = play(use)
    assert [each.id for each, _ in handed] == ["a", "b", "c", "d"]
    assert all(each.due is not None and at >= each.due for each, at in handed)


def test_what_is_late_or_has_no_time_is_handed_on_at_once() -> None:
    async def use(playout: Playout) -> None:
        kept = output("kept", asyncio.get_running_loop().time() + 60.0)
        playout.take([kept, output("at once", None), output("late", 0.0)])

    assert [each.id for each, _ in play(use)] == ["late", "at once"]


def test_all_that_waits_can_be_had_at_once() -> None:
    async def use(playout: Playout) -> None:
        now = asyncio.get_running_loop().time()
        playout.take([output(f"{after:g}", now + after) for after in (60.0, 30.0)])
        playout.flush()

    assert [each.id for each, _ in play(use)] == ["30", "60"]


def test_what_takes_the_loop_a_while_waits_until_nothing_is_due() -> None:
    """Not for what is due later, and not for long where something always is."""
    handed: list[str] = []

    async def use(playout: Playout) -> None:
        now = asyncio.get_running_loop().time
        await playout.wait_for_gap()
        playout.take([output("later", now() + 3600.0)])
        await playout.wait_for_gap()
        assert not handed
        playout.take([output("soon", now() + QUIET_SECONDS / 2)])
        await playout.wait_for_gap()
        assert handed == ["soon"]
        playout.take([output("always", now() + i * QUIET_SECONDS / 2) for i in range(10_000)])
        await playout.wait_for_gap()
        assert len(handed) < 10_000

    play(use, lambda each: handed.append(each.id))


def test_one_that_cannot_be_handed_on_keeps_nobody_waiting() -> None:
    def refuse(each: Output) -> None:
        if each.id == "bad":
            raise RuntimeError

    async def use(playout: Playout) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        with pytest.raises(RuntimeError):
            playout.take([output(id, 0.0) for id in ("bad", "good")])
        await asyncio.sleep(0.01)

    assert [each.id for each, _ in play(use, refuse)] == ["bad", "good"]
