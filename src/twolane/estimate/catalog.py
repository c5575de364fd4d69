"""The estimators by name."""

from collections.abc import Callable

from twolane.estimate import Estimator
from twolane.estimate.attention_roofline import AttentionRoofline
from twolane.estimate.calibrated import Calibrated
from twolane.estimate.guard import ContentionGuard
from twolane.estimate.profile import Profile
from twolane.estimate.sm_roofline import SmRoofline
from twolane.estimate.solo_run import SoloRun

ESTIMATORS: dict[str, Callable[[Profile], Estimator]] = {
    "solo-run": SoloRun,
    "guard": ContentionGuard,
    "sm-roofline": SmRoofline,
    "attention-roofline": AttentionRoofline,
    "calibrated": Calibrated,
}
"""Each fitted on a profile."""
