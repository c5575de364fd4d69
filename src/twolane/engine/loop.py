"""The loop: the same for all systems, all devices and the simulator."""

from collections.abc import Callable, Sequence
from typing import Protocol

from twolane.engine.engine import Engine
from twolane.engine.messages import Outputs, ToEngine
from twolane.systems.plan import Plan


class Port(Protocol):
    """The engine's connection to the API process, and its way to sleep."""

    def receive(self) -> Sequence[ToEngine] | None:
        """Return the messages since the last call without blocking; None ends the loop."""

    def send(self, outputs: Outputs) -> None:
        """Send a message to the API process."""

    def wait(self, wake_at: float | None) -> None:
        """Sleep until a message arrives, a ticket has results, or the clock reaches `wake_at`.

        Messages and results since the last `receive` end the wait at once.
        """


def run(engine: Engine, port: Port) -> None:
    """Serve until the port ends. The loop never blocks, and sleeps while there is nothing to do.

    Tokens are sent before the estimator learns and the next launches are planned, which takes
    milliseconds. Another turn follows a plan that did something; after a plan that did nothing, the
    loop sleeps.
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
    if (outputs := engine.outputs()) is not None:
        send(outputs)
    engine.publish()
    plan = engine.plan()
    return None if engine.carry_out(plan) else plan
