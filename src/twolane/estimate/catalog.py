"""The estimators by name."""

import functools
from collections.abc import Callable

from twolane.estimate.base import Estimator
from twolane.estimate.calibrated.estimator import Calibrated
from twolane.estimate.papers.attention_roofline import AttentionRoofline
from twolane.estimate.papers.guard import ContentionGuard
from twolane.estimate.papers.sm_roofline import SmRoofline
from twolane.estimate.papers.solo_run import SoloRun
from twolane.estimate.profile import Profile

ESTIMATORS: dict[str, Callable[[Profile], Estimator]] = {
    "solo-run": SoloRun,
    "guard": ContentionGuard,
    "sm-roofline": SmRoofline,
    "attention-roofline": AttentionRoofline,
    "serving-roofline": functools.partial(AttentionRoofline, serving=True),
    "calibrated": Calibrated,
}
"""Each fitted on a profile."""
