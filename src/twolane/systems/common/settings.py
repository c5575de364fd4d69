"""The check that all systems make of their settings."""

from math import inf

import msgspec

from twolane.common.errors import FieldError


def at_least(system: msgspec.Struct, **bounds: float) -> None:
    """Refuse settings that are below their bounds, infinite or no number.

    Args:
        system: whose settings they are.
        bounds: the least of each, by its name.

    Raises:
        FieldError: naming the first that is.
    """
    for name, bound in bounds.items():
        value = getattr(system, name)
        if not bound <= value < inf:
            finite = " and finite" if isinstance(value, float) else ""
            raise FieldError(name, f"must be at least {bound}{finite}, not {value}")
