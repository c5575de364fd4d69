"""Fitted estimators on disk."""

from pathlib import Path

import pytest

from tests.estimate import synthetic
from twolane.estimate.base import Estimator
from twolane.estimate.kept import kept_estimator as kept
from twolane.estimate.query import Load, decode_step

STEP = decode_step(Load.decode([1000] * 8))


def test_a_fitted_estimator_is_kept_for_its_profile_until_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fits: list[Estimator] = []

    def fit() -> Estimator:
        fits.append(synthetic.calibrated())
        return fits[-1]

    first = kept("calibrated", b"profile", fit)
    again = kept("calibrated", b"profile", fit)
    assert len(fits) == 1
    assert again is not first
    assert again.predict(STEP, 64, bound=True) == first.predict(STEP, 64, bound=True)
    again.observe(STEP, 64, 1.0)  # what it learns is its own
    assert kept("calibrated", b"profile", fit).predict(STEP, 64) == first.predict(STEP, 64)
    kept("calibrated", b"another", fit)
    assert len(fits) == 2
    for file in (tmp_path / "twolane" / "estimators").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    kept("calibrated", b"profile", fit)
    assert len(fits) == 3
