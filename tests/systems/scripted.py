"""What tests need of a system besides its plans."""

from typing import ClassVar

from twolane.common.vocabulary import EstimatorName


class ScriptedSystem:
    """A system whose subclass only plans; it keeps nothing in memory."""

    estimator: ClassVar[EstimatorName] = "calibrated"
    reads_slos: ClassVar[bool] = False
    gives_up: ClassVar[bool] = False

    def start(self) -> None:
        return None
