"""The systems that parametrised tests run: all registered ones and the example.

`pytest --system package.module.Class` runs them for that system instead.
"""

from twolane.systems.registry import SYSTEMS

EXAMPLE = "examples.earliest_deadline.EarliestDeadline"
SYSTEM_NAMES = [*SYSTEMS, EXAMPLE]


def only(name: str) -> None:
    """Run one system alone."""
    SYSTEM_NAMES[:] = [name]
