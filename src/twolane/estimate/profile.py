"""Profiles: what launches took on one device with one model, as measured, stored as JSON.

One file for each GPU, driver, state of the kernels, model shape and degree of tensor parallelism.
Samples are kept as they were measured; what estimators make of them is made when they are loaded.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from twolane.common.checked_json import UNREADABLE
from twolane.common.files import write_atomically
from twolane.devices import MachineKind
from twolane.estimate.query import Corunner, Kind, LaunchShape, Load
from twolane.model.spec import ModelSpec

FORMAT = 2
"""Version of the file's format; it is raised when a reader of the old one would misread it."""
LAUNCHES_SINCE = "0.1.0"
"""The version of Twolane in which kernels or the shapes of launches last changed the time that a
launch takes. Set it to the next version when you change them so; other releases keep profiles."""

_UNTIMED = {
    *("max_positions", "rope", "eos_token_ids", "norm_eps", "out_norm_eps", "logit_cap"),
    *("attention_scale", "embedding_scale", "residual_scale", "logit_scale"),
}
"""Fields of a shape that do not matter to time."""

OLD_NAME, NEW_NAME = b'"woken"', b'"experts_read"'
"""Name of a field of samples in files until 2026-11-30, and since."""

ANCHOR = "anchor"
"""Beginning of the names of points that are corners of the plan."""

Run = tuple[int, int, int]


class ProfileError(ValueError):
    """A profile cannot be read, or is of something else."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device, driver, kernels and model of a profile. One of another key predicts nothing."""

    device: str
    """Name of the GPU by its driver, or of the CPU."""
    driver: str
    version: str
    """`LAUNCHES_SINCE` of the engine that was measured."""
    model: str
    """`model_digest` of the shape."""
    itemsize: int
    """Bytes of an element of activations and of the classifier."""
    units: int
    """Units of the device."""
    tensor_parallel: int = 1
    weight_itemsize: float | None = None
    """Bytes of an element of the layers' matrices, scales included; None: `itemsize`."""
    kv_itemsize: float | None = None
    """Bytes of an element of the KV cache, scales included; None: `itemsize`."""

    @property
    def file_name(self) -> str:
        """Name of its file in the cache."""
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        rest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]
        return f"{device}-{self.model}-tp{self.tensor_parallel}-{rest}.json"


class Neighbour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The work in the other lane during a measurement."""

    runs: list[Run]
    units: int

    @property
    def corunner(self) -> Corunner:
        """The work as a corunner, for estimators."""
        return Corunner(load_of(self.runs), self.units)


class Sample(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, dict=True
):
    """A configuration that was measured several times."""

    point: str
    """The point of the measurement plan that it belongs to."""
    kind: Kind
    runs: list[Run]
    """[n, r, how many requests] in order: n new tokens over r reused ones each."""
    units: int
    layers: int
    """Layers of the slice; all layers for decode steps and hybrid passes."""
    finishes: bool
    """Whether the model's last layer and the sampling are in it."""
    seconds: list[float]
    """Seconds of each launch (each step, for decode), in the order measured."""
    beside: Neighbour | None = None
    """Work in the other lane; None: there was none."""
    sm_hz: float | None = None
    """Mean clock of the SMs meanwhile; None: unknown."""
    memory_hz: float | None = None
    watts: float | None = None
    """Mean power of the board meanwhile."""
    held_out: bool = False
    """Whether it is kept for measuring errors instead of fitting."""
    experts_read: float | None = None
    """Mean number of experts of a layer that a decode step has read; None: unknown."""

    @property
    def anchors(self) -> bool:
        """Whether it is of the plan's corners."""
        return self.point.startswith(ANCHOR)

    @cached_property
    def configuration(self) -> str:
        """The configuration without its units: samples of one are not independent."""
        return f"{self.runs} beside {self.beside and self.beside.runs}"

    @cached_property
    def load(self) -> Load:
        """The load of the runs, for estimators."""
        return load_of(self.runs)

    @property
    def launch(self) -> LaunchShape:
        """The launch, as estimators take it."""
        layers = self.layers if self.kind == "prefill" else 0
        return LaunchShape(self.kind, self.load, layers, self.finishes)

    @property
    def corunner(self) -> Corunner | None:
        """The work in the other lane, as estimators take it."""
        return None if self.beside is None else self.beside.corunner

    @cached_property
    def median(self) -> float:
        """Median of the seconds."""
        return float(np.median(self.seconds))


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of two kernels that serve nothing on some units (DuetServe §4.2)."""

    units: int
    flop_rate: float
    """FLOP/s of a large matrix product."""
    byte_rate: float
    """Bytes/s of a large copy, those that it reads and those that it writes."""


class ContendedProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rate of a copy on some units beside a matrix product on all others (Bullet §3.2.3)."""

    units: int
    """Units of the copy."""
    rows: int
    """Rows of the product, whose weights are those of the model's up and gate projection."""
    byte_rate: float
    """Bytes/s of the copy, those that it reads and those that it writes."""


class Interconnect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between the GPUs of one server; the defaults are NVLink of an H100 or H200."""

    bytes_per_second: float = 450e9
    """Bytes per second of one GPU's links together, one way."""
    startup_seconds: float = 3e-6
    """Seconds that one hop of the ring takes to start."""
    units: int = 32
    """Number of units with which a collective reaches this rate (N_w of Bullet §3.2.2)."""


class Profile(msgspec.Struct, forbid_unknown_fields=True):
    """Everything that was measured of one key."""

    key: Key
    shape: ModelSpec
    """Shape of the model."""
    levels: list[tuple[int, int]]
    """(prefill units, decode units) on offer, the solo ones too."""
    page_size: int
    seed: int
    """Seed of the order of measurement and of what is held out."""
    samples: list[Sample] = []
    seconds: float = 0.0
    """Seconds spent on measuring, over all runs."""
    planned: int = 0
    """Points of the plan that the last run worked on; fewer were measured if it was cut off."""
    notes: list[str] = []
    """Points that were left out, and why."""
    machine: MachineKind = "cpu"
    """Kind of the device, which determines its kernels."""
    pass_sizes: tuple[int, ...] = ()
    """Token counts that passes were padded to, ascending; empty if they were not padded."""
    probes: list[Probe] = []
    """Rates of copies and matrix products by number of units; empty if not measured."""
    contended: list[ContendedProbe] = []
    """Rates of copies beside matrix products; empty if not measured."""
    interconnect: Interconnect = Interconnect()
    """The link between the ranks; it matters with tensor parallelism alone."""
    format: int = FORMAT

    def training(self, kind: Kind, *, beside: bool | None = None) -> list[Sample]:
        """Samples to fit on; `beside`: only with, or only without, work in the other lane."""
        return [s for s in self.of(kind, beside=beside) if not s.held_out]

    def of(self, kind: Kind, *, beside: bool | None = None) -> list[Sample]:
        """Return all samples of a kind, held out or not."""
        wanted = (s for s in self.samples if s.kind == kind)
        return [s for s in wanted if beside is None or (s.beside is not None) == beside]

    def done(self) -> set[str]:
        """Return the points that were measured."""
        return {sample.point for sample in self.samples}

    def save(self, path: Path) -> None:
        """Write it whole or not at all, with the digest of its samples."""
        raw = {**msgspec.to_builtins(self), "digest": _digest(msgspec.json.encode(self.samples))}
        write_atomically(path, msgspec.json.format(msgspec.json.encode(raw), indent=0))

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read a profile. Its key has the digest of its shape that this version makes.

        Raises:
            ProfileError: there is none, or it is none; the message names the file.
        """
        try:
            text = path.read_bytes().replace(OLD_NAME, NEW_NAME)
            raw = msgspec.json.decode(text, type=dict[str, Any])
            if raw.get("format", FORMAT) != FORMAT:
                problem = f"has format {raw['format']}; this version reads {FORMAT}"
                raise ProfileError(f"{path} {problem}: measure again with `twolane profile`")
            digest = raw.pop("digest", None)  # the first profiles have none
            profile = msgspec.convert(raw, cls)
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror}") from error
        except UNREADABLE as error:
            raise ProfileError(f"{path} is not a profile of this version: {error}") from error
        samples = msgspec.json.encode(profile.samples)
        if digest not in (None, _digest(samples), _digest(samples.replace(NEW_NAME, OLD_NAME))):
            raise ProfileError(f"{path} is damaged: its samples have another digest")
        profile.key = structs.replace(profile.key, model=model_digest(profile.shape))
        return profile


def _digest(samples: bytes) -> str:
    return hashlib.sha256(samples).hexdigest()


def load_of(runs: Sequence[Run]) -> Load:
    """Return the load of [n, r, count] runs."""
    reused = [r for _, r, count in runs for _ in range(count)]
    if all(n == 1 for n, _, _ in runs):
        return Load.decode(reused)
    return Load([n for n, _, count in runs for _ in range(count)], reused)


def runs_of(pairs: Iterable[tuple[int, int]]) -> list[Run]:
    """Return the runs of requests, given the (n, r) of each."""
    runs: list[Run] = []
    for n, r in pairs:
        if runs and runs[-1][:2] == (n, r):
            runs[-1] = (n, r, runs[-1][2] + 1)
        else:
            runs.append((n, r, 1))
    return runs


def model_digest(shape: ModelSpec) -> str:
    """Return a short digest of the fields of a shape that matter to time.

    Fields that have their defaults do not count, so it stays when one is added.
    """
    kinds = [_set_fields(replace(kind, rope=None)) for kind in shape.kinds]
    given = {**_set_fields(shape), "kinds": kinds if any(kinds) else []}
    timed = {name: value for name, value in given.items() if name not in _UNTIMED}
    return hashlib.sha256(msgspec.json.encode(timed)).hexdigest()[:10]


def _set_fields(part: Any) -> Any:
    """Return the fields of a shape, or of a part of one, that have not their defaults."""
    if not is_dataclass(part):
        return part
    values = {field.name: (getattr(part, field.name), field.default) for field in fields(part)}
    return {name: _set_fields(value) for name, (value, usual) in values.items() if value != usual}


def cached_profile(directory: Path, key: Key) -> Path:
    """Return the path of this key's profile under Twolane's cache directory.

    A profile stays in use when the digest of its shape changes, under the name that it has.
    """
    path = directory / "profiles" / key.file_name
    if path.exists():
        return path
    found = path.parent.glob(f"{path.name.partition(key.model)[0]}*.json")
    of_device = sorted(old for old in found if "." not in old.stem)  # not of simulations
    return next((old for old in of_device if _key_of(old) == key), path)


def _key_of(path: Path) -> Key | None:
    """Return the key of a profile with today's digest of its shape; None: it is none."""
    try:
        there = msgspec.json.decode(path.read_bytes(), type=_Keyed)
    except (OSError, *UNREADABLE):
        return None
    return structs.replace(there.key, model=model_digest(there.shape))


SHIPPED = Path(__file__).parent / "profiles"
"""Profiles that come with the package, one file `MODEL-CARD.json` each."""


def shipped_profile(key: Key) -> Path | None:
    """Return the package's profile of that card and model, if any.

    It may have been taken with another driver or version, and on another card of the same kind.
    """
    wanted = structs.replace(key, driver="", version="")
    for path in sorted(SHIPPED.glob("*.json")):
        there = _key_of(path)
        if there and structs.replace(there, driver="", version="") == wanted:
            return path
    return None


class _Keyed(msgspec.Struct):
    """The part of a profile that identifies it."""

    key: Key
    shape: ModelSpec
