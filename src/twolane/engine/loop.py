"""The loop: the same for all systems, all devices and the simulator."""

from collections.abc import Callable, Sequence
from typing import Protocol

from twolane.engine.engine import Engine
from twolane.engine.messages import Outputs, ToEngine
from twolane.systems.plan import Plan


class Port(Protocol):
    """Where the engine's requests come from and its tokens go to, and how it sleeps."""

    def receive(self) -> Sequence[ToEngine] | None:
        """What has arrived since the last call, without blocking; None: stop."""

    def send(self, news: Outputs) -> None:
        """Hand news to the API process."""

    def wait(self, wake_at: float | None) -> None:
        """Sleep until a message or a lane has news, or until `wake_at` on the lanes' clock.

        News that came since the last `receive` counts: nothing is slept through.
        """


def run(engine: Engine, port: Port) -> None:
    """Serve until the port says stop. Polls when woken, never blocks, never spins at rest.

    Tokens are sent before the estimator learns and what comes next is planned and launched, which
    takes milliseconds, and between one plan and the next. A plan that did something is followed by
    another one; a plan that did nothing has seen all that there was to see. What came meanwhile
    ends the wait at once.
    """
    while (messages := port.receive()) is not None:
        idle = turn(engine, messages, port.send)
        if idle is not None:
            port.wait(idle.wake_at)


def turn(
    engine: Engine, messages: Sequence[ToEngine], send: Callable[[Outputs], None]
) -> Plan | None:
    """Make one turn; return the plan if it did nothing, else None."""
    engine.take(messages)
    engine.reap()
    if (news := engine.news()) is not None:
        send(news)
    engine.publish()
    plan = engine.plan()
    return None if engine.carry_out(plan) else plan
