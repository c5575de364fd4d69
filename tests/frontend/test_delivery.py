"""When outputs of the engine are delivered."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from twolane.engine.lateness import Lateness
from twolane.engine.messages import Output
from twolane.frontend.delivery import GROUP_SECONDS, QUIET_SECONDS, DeliveryQueue


def play(
    use: Callable[[DeliveryQueue], Coroutine[Any, Any, None]],
    deliver: Callable[[Output], None] = lambda output: None,
) -> list[tuple[Output, float]]:
    """Return what was delivered, and when."""
    delivered = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def note(output: Output) -> None:
            delivered.append((output, loop.time()))
            deliver(output)

        queue = DeliveryQueue(note, lambda spread: None)
        await use(queue)
        queue.close()

    asyncio.run(run())
    return delivered


def output(id: str, due: float | None) -> Output:
    return Output(id, [7], due=due)


def test_each_is_delivered_when_it_is_due_and_those_of_a_time_in_order() -> None:
    async def use(queue: DeliveryQueue) -> None:
        due = asyncio.get_running_loop().time() + 0.3  # on a busy host adding takes its time
        for id, after in (("c", 0.05), ("a", 0.01), ("d", 0.05), ("b", 0.02)):
            queue.add([output(id, due + after)])
        await asyncio.sleep(0.6)

    delivered = play(use)
    assert [each.id for each, _ in delivered] == ["a", "b", "c", "d"]
    assert all(each.due is not None and at >= each.due for each, at in delivered)


def test_what_is_late_or_has_no_time_is_delivered_at_once() -> None:
    async def use(queue: DeliveryQueue) -> None:
        kept = output("kept", asyncio.get_running_loop().time() + 60.0)
        queue.add([kept, output("at once", None), output("late", 0.0)])

    assert [each.id for each, _ in play(use)] == ["late", "at once"]


def test_the_spread_of_late_deliveries_is_reported_once_a_second() -> None:
    """Three of 150 are 40 ms late and the others less than 0.1 ms: P99 minus median."""
    lateness, spreads = Lateness(), []
    for i in range(300):
        due = 10.0 + i / 100
        spread = lateness.add(due, due + (0.04 if i % 50 == 7 else 0.00005))
        spreads += [] if spread is None else [spread]
    assert spreads == pytest.approx([0.03995, 0.03995])
    assert lateness.counts[0] == 294
    assert sum(lateness.counts) == 300
    assert lateness.total == pytest.approx(6 * 0.04 + 294 * 0.00005)


def test_a_part_of_very_many_deliveries_has_their_spread() -> None:
    lateness, spreads = Lateness(), []
    for i in range(100_000):
        due = 10.0 + i / 20_000
        spread = lateness.add(due, due + (0.04 if i % 50 == 7 else 0.00005))
        spreads += [] if spread is None else [spread]
    assert spreads == pytest.approx([0.03995] * 5)
    assert sum(lateness.counts) == 100_000


def test_those_due_at_almost_the_same_time_are_delivered_together() -> None:
    """In one turn of the loop, at the end of their interval, so that none is early."""
    log: list[str] = []

    async def use(queue: DeliveryQueue) -> None:
        first = (int(asyncio.get_running_loop().time() / GROUP_SECONDS) + 20) * GROUP_SECONDS
        dues = [first + (i + 0.5) * GROUP_SECONDS / 8 for i in range(16)]
        queue.add([output(f"{place}", due) for place, due in enumerate(dues)])
        await asyncio.sleep(0.05)

    def note(each: Output) -> None:
        log.append(each.id)
        asyncio.get_running_loop().call_soon(log.append, "turn")

    delivered = play(use, note)
    assert [each.id for each, _ in delivered] == [f"{place}" for place in range(16)]
    assert all(each.due is not None and at >= each.due for each, at in delivered)
    assert "turn" not in log[:8]
    ninth = log.index("8")
    assert "turn" not in log[ninth : ninth + 8]


def test_outputs_without_a_due_time_are_not_late() -> None:
    async def use(queue: DeliveryQueue) -> None:
        now = asyncio.get_running_loop().time()
        queue.add([output("at once", None), output("late", now - 0.0025)])
        assert sum(queue.lateness.counts) == 1
        assert queue.lateness.total >= 0.0025

    play(use)


def test_all_that_waits_can_be_had_at_once() -> None:
    async def use(queue: DeliveryQueue) -> None:
        now = asyncio.get_running_loop().time()
        queue.add([output(f"{after:g}", now + after) for after in (60.0, 30.0)])
        queue.flush()

    assert [each.id for each, _ in play(use)] == ["30", "60"]


def test_what_takes_the_loop_a_while_waits_until_nothing_is_due() -> None:
    """Not for what is due later, and not for long where something always is."""
    delivered: list[str] = []

    async def use(queue: DeliveryQueue) -> None:
        now = asyncio.get_running_loop().time
        await queue.wait_for_gap()
        queue.add([output("later", now() + 3600.0)])
        await queue.wait_for_gap()
        assert not delivered
        queue.add([output("soon", now() + QUIET_SECONDS / 2)])
        await queue.wait_for_gap()
        assert delivered == ["soon"]
        queue.add([output("always", now() + i * QUIET_SECONDS / 2) for i in range(10_000)])
        await queue.wait_for_gap()
        assert len(delivered) < 10_000
        queue.flush()
        delivered.clear()
        first = now() + QUIET_SECONDS / 2
        places = 0, 1, 2, 6, 7  # in units of half the quiet time: a gap is after the third
        queue.add([output(f"{i}", first + i * QUIET_SECONDS / 2) for i in places])
        await queue.wait_for_gap()
        assert delivered[:3] == ["0", "1", "2"]

    play(use, lambda each: delivered.append(each.id))


def test_one_that_cannot_be_delivered_keeps_nobody_waiting() -> None:
    def refuse(each: Output) -> None:
        if each.id == "bad":
            raise RuntimeError

    async def use(queue: DeliveryQueue) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        with pytest.raises(RuntimeError):
            queue.add([output(id, 0.0) for id in ("bad", "good")])
        await asyncio.sleep(0.01)

    assert [each.id for each, _ in play(use, refuse)] == ["bad", "good"]


def test_where_many_wait_those_of_two_intervals_go_together() -> None:
    """Fewer times to wake up; none comes early, and a stream's tokens keep their order."""

    async def use(queue: DeliveryQueue) -> None:
        first = (int(asyncio.get_running_loop().time() / GROUP_SECONDS) + 2000) * GROUP_SECONDS
        dues = [first + (i + 0.5) * GROUP_SECONDS / 40 for i in range(800)]
        queue.add([output(str(i), due) for i, due in enumerate(dues)])
        ends.append(len(queue._ends))
        await asyncio.sleep(0.6)
        queue.add([output(str(i), due + 1.0) for i, due in enumerate(dues[:400])])
        ends.append(len(queue._ends))
        await asyncio.sleep(1.0)

    ends: list[int] = []
    delivered = play(use)
    assert [each.id for each, _ in delivered] == [*map(str, range(800)), *map(str, range(400))]
    assert all(each.due is not None and at >= each.due for each, at in delivered)
    assert ends == [pytest.approx(10, abs=1), pytest.approx(10, abs=1)]  # of 20 and 10 intervals
