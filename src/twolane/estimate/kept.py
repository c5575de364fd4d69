"""Fitted estimators, kept in the user's cache: fitting takes a start two seconds."""

import hashlib
import pickle
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from twolane.common.files import user_cache, write_cache
from twolane.estimate.base import Estimator
from twolane.estimate.names import EstimatorName


def kept(name: EstimatorName, profile: bytes, fit: Callable[[], Estimator]) -> Estimator:
    """Return the estimator that an earlier start has fitted; else fit and keep it.

    A file that is damaged, or that cannot be written, is fitted again.

    Args:
        name: Name of the estimator.
        profile: Digest of the profile that it is fitted on.
        fit: Fits it.
    """
    made_of = hashlib.sha256(name.encode() + profile + _code()).hexdigest()[:32]
    path = user_cache() / "twolane" / "estimators" / f"{made_of}.pickle"
    size = hashlib.sha256().digest_size
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if len(data) > size and data[:size] == hashlib.sha256(data[size:]).digest():
        found = pickle.loads(data[size:])
        assert isinstance(found, Estimator)
        return found
    estimator = fit()
    content = pickle.dumps(estimator)
    write_cache(path, hashlib.sha256(content).digest() + content)
    return estimator


@cache
def _code() -> bytes:
    """Return a digest of the sources of this package, and of the libraries that they fit with."""
    libraries = [f"{each} {version(each)}" for each in ("numpy", "scipy")]
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    parts = [*libraries, *(f"{each.name}\n{each.read_text()}" for each in sources)]
    return hashlib.sha256("\0".join(parts).encode()).digest()
