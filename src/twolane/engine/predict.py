"""Choice of the engine's estimator: fitted on the profile of this machine and model, or online."""

import copy
import functools
import hashlib
import logging
import shutil
import subprocess
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from threadpoolctl import threadpool_limits

from twolane.common.errors import FieldError
from twolane.common.resources import cpu_name
from twolane.engine.config import EngineConfig
from twolane.estimate.base import Estimator
from twolane.estimate.kept import kept_estimator
from twolane.estimate.names import EstimatorName
from twolane.estimate.online import OnlineEstimator
from twolane.estimate.profile import (
    LAUNCHES_SINCE,
    Key,
    Profile,
    ProfileError,
    cached_profile,
    model_digest,
    shipped_profile,
)
from twolane.lanes.base import Machine
from twolane.model.load.hub import cache_dir

log = logging.getLogger("twolane.predict")

KEY_PARTS = Key.__struct_fields__


def find_profile(config: EngineConfig, key: Key) -> Path | None:
    """Return the profile that is named, else the cache's or the package's of this device and
    model, if any."""
    if config.profile is not None:
        return Path(config.profile)
    path = cached_profile(cache_dir(), key)
    if not path.exists():
        return shipped_profile(key)
    try:
        made_of = read_profile(path).key
        if others := [part for part in KEY_PARTS if getattr(made_of, part) != getattr(key, part)]:
            raise ProfileError(f"{path} was measured with another {' and '.join(others)}")
    except (ProfileError, OSError) as error:
        log.warning("%s: ignored; `twolane profile` replaces it", error)
        return shipped_profile(key)
    return path


def make_estimator(
    path: Path | None,
    name: EstimatorName,
    key: Key,
    levels: Iterable[tuple[int, int]] = (),
    *,
    keep: bool = False,
) -> Estimator:
    """Return an estimator fitted on a profile; without one, the online estimator.

    Args:
        path: the profile's file.
        name: the estimator to fit.
        key: The key of a profile that would be taken here.
        levels: Units of the two lanes that plans may choose, a pair each.
        keep: Whether the fitted estimator is kept on disk for the next start.

    Raises:
        FieldError: the profile is of something else, or too small.
    """
    if path is None:
        return OnlineEstimator()
    try:
        profile = read_profile(path)
        sizes = "itemsize", "weight_itemsize", "kv_itemsize"
        for part in ("device", "model", *sizes, "units", "tensor_parallel"):
            there, here = getattr(profile.key, part), getattr(key, part)
            if there != here:
                raise ProfileError(f"{path} is of {part} {there!r}; this is {here!r}")
        for part, what in (("driver", "driver"), ("version", "launches as of version")):
            there, here = getattr(profile.key, part), getattr(key, part)
            if there != here:
                log.warning("the profile was measured with %s %s; this is %s", what, there, here)
        estimator = fitted(path, name, keep=keep)
    except (ProfileError, OSError) as error:
        raise FieldError("profile", str(error)) from error
    log.info("predictions: %s, fitted on %d samples of %s", name, len(profile.samples), path)
    if not any(sample.held_out for sample in profile.samples):
        log.warning(
            "the profile has only its first points, so predictions are rough: run the same "
            "`twolane profile` again to continue it"
        )
    if profile.machine != "simulated" and (least := _least_units(levels, profile.levels)):
        log.warning(
            "the profile has no lanes of fewer than %s, so predictions for these are rough: "
            "`twolane profile` measures them",
            " and ".join(least),
        )
    return copy.deepcopy(estimator)  # it learns


def _least_units(
    levels: Iterable[tuple[int, int]], measured: Iterable[tuple[int, int]]
) -> list[str]:
    """Return, in words, the fewest measured units of each lane that may have fewer."""
    units_of = zip(*levels, strict=True), zip(*measured, strict=True)
    named = []
    for lane, here, there in zip(("prefill", "decode"), *units_of, strict=False):
        least = min(filter(None, there))
        if min(filter(None, here)) < least:
            named.append(f"{least} units for {lane}")
    return named


# A search runs many simulations on one profile, and fitting takes a second.


def read_profile(path: Path) -> Profile:
    """Read a profile, once for as long as its content does not change.

    Raises:
        OSError, ProfileError: it cannot be read.
    """
    return _read(path, _digest(path))


def fitted(path: Path, name: EstimatorName, *, keep: bool = False) -> Estimator:
    """Fit an estimator on a profile, once for as long as its content does not change.

    It is shared: copy it before it learns. With `keep`, it is kept on disk, too.

    Raises:
        OSError, ProfileError: the profile cannot be read, or is too small.
    """
    digest = _digest(path)
    if keep:
        return kept_estimator(name, digest, partial(_fitted, path, digest, name))
    return _fitted(path, digest, name)


def _digest(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


@functools.lru_cache(maxsize=8)
def _read(path: Path, digest: bytes) -> Profile:
    return Profile.read(path)


@functools.lru_cache(maxsize=8)
def _fitted(path: Path, digest: bytes, name: EstimatorName) -> Estimator:
    from twolane.estimate.catalog import ESTIMATORS  # scipy takes a while

    # On 64 cores the small products of a fit keep all of them busy for seconds, otherwise.
    with threadpool_limits(1, user_api="blas"):
        return ESTIMATORS[name](_read(path, digest))


def machine_key(machine: Machine, units: int) -> Key:
    """Return the key of profiles taken on this machine."""
    itemsize, weights, kv = machine.itemsize, machine.weight_itemsize, machine.kv_itemsize
    return Key(
        device=cpu_name() if machine.kind == "cpu" else machine.name,
        driver=_driver_version() if machine.kind == "cuda" else machine.revision,
        version=LAUNCHES_SINCE,
        model=model_digest(machine.spec),
        itemsize=itemsize,
        units=units,
        tensor_parallel=machine.tp,
        weight_itemsize=None if weights == itemsize else weights,
        kv_itemsize=None if kv == itemsize else kv,
    )


def _driver_version() -> str:
    """Return the GPU's driver version; empty where `nvidia-smi` has none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else ""
