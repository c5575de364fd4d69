"""Profiles: what launches took on one device with one model, as measured, stored as JSON.

One file for each GPU, driver, state of the kernels, model shape and degree of tensor parallelism.
Samples are kept as they were measured; what estimators make of them is made when they are loaded.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from msgspec import structs

from twolane.common.checked_json import UNREADABLE
from twolane.common.files import write_atomically
from twolane.devices import MachineKind
from twolane.estimate.query import Corunner, Kind, LaunchShape, Load
from twolane.kernels.sizes import SIZES
from twolane.model.spec import FULL, LayerKind, ModelSpec, MoeSpec, RopeSpec

FORMAT = 2
"""Version of the file's format; it is raised when a reader of the old one would misread it."""
LAUNCHES_SINCE = "0.1.0"
"""The version of Twolane in which kernels or the shapes of launches last changed the time that a
launch takes. Set it to the next version when you change them so; other releases keep profiles."""

_SIZES = (
    *("family", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size"),
    "vocab_size",
)
_SWITCHES = ("tie_embeddings", "qkv_bias", "o_bias", "mlp_bias")
_NEWER_OF_EXPERTS = (
    *("skew", "sigmoid", "biased", "scale", "shared", "gated"),
    *("beside_dense", "biases"),
)
_ROPE_FIELDS = (
    *("theta", "type", "factor", "original_positions", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "truncate", "attention_factor", "divisors"),
)
"""Fields of the rotation in the first profiles. Their values do not matter to time."""

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
    experts_read: float | None = msgspec.field(default=None, name="woken")
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
        raw = {**msgspec.to_builtins(self), "digest": _digest(self.samples)}
        write_atomically(path, msgspec.json.format(msgspec.json.encode(raw), indent=0))

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read a profile.

        Raises:
            ProfileError: there is none, or it is none; the message names the file.
        """
        try:
            raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            digest = raw.pop("digest", None)  # the first profiles have none
            profile = msgspec.convert({**raw, "shape": _present_shape(raw.get("shape"))}, cls)
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror}") from error
        except UNREADABLE as error:
            raise ProfileError(f"{path} is not a profile: {error}") from error
        if profile.format == 1:
            _name_machine(profile)
        if profile.format != FORMAT:
            raise ProfileError(f"{path} has format {profile.format}; this version reads {FORMAT}")
        if digest not in (None, _digest(profile.samples)):
            raise ProfileError(f"{path} is damaged: its samples have another digest")
        return profile


def _digest(samples: Sequence[Sample]) -> str:
    return hashlib.sha256(msgspec.json.encode(samples)).hexdigest()


def _name_machine(profile: Profile) -> None:
    """Complete a profile of format 1, which has kind and pass sizes in the device's name alone."""
    for kind in get_args(MachineKind):
        if profile.key.device.startswith(kind):
            profile.machine = kind
    profile.pass_sizes = () if profile.machine == "cpu" else SIZES
    profile.format = FORMAT


def _present_shape(shape: Any) -> Any:
    """Return the fields of a shape as `ModelSpec` has them now.

    The first profiles have a switch for each place of norms, and lists of the layers with a window
    and of those that are not rotated.
    """
    if not isinstance(shape, dict) or not isinstance(shape.get("qk_norm"), bool):
        return shape
    before, after = shape.get("pre_norms", True), shape.get("post_norms", False)
    places = {"input_norm": before, "attention_out_norm": after}
    places |= {"mlp_norm": before, "mlp_out_norm": after}
    sliding, unrotated = (shape.get(f"{name}_layers") or () for name in ("sliding", "unrotated"))
    kinds = [
        {
            "window": shape.get("sliding_window") if i in sliding else None,
            "rope": {"type": "none"} if i in unrotated else None,
        }
        for i in range(shape.get("layers", 0) if sliding or unrotated else 0)
    ]
    whole = "whole" if shape.get("qk_norm_whole") else "head"
    norms = [name for name, there in places.items() if there]
    return {**shape, "qk_norm": whole if shape["qk_norm"] else None, "norms": norms, "kinds": kinds}


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

    Newer fields count only where they have not their defaults, so that profiles stay in use.
    """
    kinds = [replace(shape.kind(i), rope=None) for i in range(shape.layers)]
    sliding = [i for i, kind in enumerate(kinds) if kind.window is not None]
    window = kinds[sliding[0]].window if sliding else None
    fields: dict[str, Any] = {name: getattr(shape, name) for name in _SIZES}
    fields |= {"max_positions": 0, "norm_eps": 0.0}
    fields["rope"] = {name: getattr(RopeSpec(), name) for name in _ROPE_FIELDS}
    fields |= {name: getattr(shape, name) for name in _SWITCHES}
    fields["qk_norm"] = shape.qk_norm is not None
    newer = {
        "qk_norm_whole": shape.qk_norm == "whole",
        "pre_norms": "input_norm" in shape.norms,
        "post_norms": shape.norms_outputs,
    }
    fields |= {name: on for name, on in newer.items() if on == (name != "pre_norms")}
    fields |= {"sliding_window": window, "sliding_layers": sliding, "eos_token_ids": ()}
    if shape.moe is not None:
        old = MoeSpec(experts=0, per_token=0, intermediate_size=0)
        fields["moe"] = {
            name: value
            for name, value in msgspec.to_builtins(shape.moe).items()
            if name not in _NEWER_OF_EXPERTS or value != getattr(old, name)
        }
    if any(kind not in (FULL, LayerKind(window=window)) for kind in kinds):
        fields["kinds"] = kinds
    own_activation = None if shape.activation == "silu" else shape.activation
    more = {
        **{name: getattr(shape, name) for name in ("delta", "convolution", "gate", "output_gate")},
        "activation": own_activation,
        **{name: getattr(shape, name) for name in ("v_norm", "layer_scales", "layer_inputs")},
    }
    fields |= {name: value for name, value in more.items() if value}
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:10]


def cached_profile(directory: Path, key: Key) -> Path:
    """Return the path of this key's profile under Twolane's cache directory."""
    return directory / "profiles" / key.file_name


SHIPPED = Path(__file__).parent / "profiles"
"""Profiles that come with the package, one file `MODEL-CARD.json` each."""


def shipped_profile(key: Key) -> Path | None:
    """Return the package's profile of that card and model, if any.

    It may have been taken with another driver or version, and on another card of the same kind.
    """
    wanted = structs.replace(key, driver="", version="")
    for path in sorted(SHIPPED.glob("*.json")):
        there = msgspec.json.decode(path.read_bytes(), type=_Keyed).key
        if structs.replace(there, driver="", version="") == wanted:
            return path
    return None


class _Keyed(msgspec.Struct):
    """The part of a profile that identifies it."""

    key: Key
