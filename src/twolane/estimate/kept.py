"""Fitted estimators, kept in the user's cache: fitting takes a start two seconds."""

import hashlib
import pickle
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from twolane.common.files import kept, user_cache
from twolane.estimate.base import Estimator
from twolane.estimate.names import EstimatorName


def kept_estimator(name: EstimatorName, profile: bytes, fit: Callable[[], Estimator]) -> Estimator:
    """Return the estimator that an earlier start has fitted and kept; else fit and keep it.

    Args:
        name: Name of the estimator.
        profile: Digest of the profile that it is fitted on.
        fit: Fits it.
    """
    made_of = hashlib.sha256(name.encode() + profile + _code()).hexdigest()[:32]
    path = user_cache() / "twolane" / "estimators" / f"{made_of}.pickle"
    found = pickle.loads(kept(path, lambda: pickle.dumps(fit())))
    assert isinstance(found, Estimator)
    return found


@cache
def _code() -> bytes:
    """Return a digest of the sources of this package, and of the libraries that they fit with."""
    libraries = [f"{each} {version(each)}" for each in ("numpy", "scipy")]
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    parts = [*libraries, *(f"{each.name}\n{each.read_text()}" for each in sources)]
    return hashlib.sha256("\0".join(parts).encode()).digest()
