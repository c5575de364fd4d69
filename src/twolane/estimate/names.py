"""Names of the estimators that are fitted on a profile."""

from typing import Literal

EstimatorName = Literal[
    "calibrated", "solo-run", "guard", "sm-roofline", "attention-roofline", "serving-roofline"
]
"""Estimators that are fitted on a profile; `estimate/catalog.py` has them."""
