"""The base class of a system: what the engine needs of a policy."""

from collections.abc import Sequence
from typing import Any, ClassVar

from twolane.estimate.names import EstimatorName
from twolane.systems.plan import Plan
from twolane.systems.view import View


class System:
    """A policy with its settings, which a subclass has as the fields of a frozen struct.

    A subclass inherits from `System` and `msgspec.Struct`. The first line of its docstring is its
    description. Its memory is a small frozen state, which it gets again at the next scheduling
    point. A system never imports torch.
    """

    __slots__ = ()

    estimator: ClassVar[EstimatorName] = "calibrated"
    """Name of the estimator that the system uses with a profile, unless the user names another."""
    reads_slos: ClassVar[bool] = True
    """Whether plans depend on latency bounds; if not, one run of a search counts for every
    bound."""
    splits: ClassVar[bool] = True
    """Whether plans may give a lane a part of the device."""
    gives_up: ClassVar[bool] = False
    """Whether prompts that cannot meet their deadline are served after smaller ones that can."""

    def start(self) -> Any:
        """Return the memory before the first plan; by default a system keeps none."""
        return None

    def plan(self, view: View, memory: Any) -> tuple[Plan, Any]:
        """Return the next plan and the new memory, which depend on nothing but the arguments."""
        raise NotImplementedError

    def decode_shares(self, units: int, step: int) -> Sequence[int] | None:
        """Return the units for decode of each level that the system wants; None: the default ones.

        Args:
            units: The number of units of the device.
            step: The number of units between two shares on offer.
        """
        return None
