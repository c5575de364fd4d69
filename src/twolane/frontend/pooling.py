"""How a checkpoint makes one vector of a text, in the form of `sentence-transformers`."""

from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
import numpy.typing as npt

from twolane.common.checked_json import converted, read_json

MODULES = "modules.json"
KINDS = ("Transformer", "Pooling", "Normalize")
"""Modules that are carried out, in this order; the last may be missing, for all vectors have the
length 1."""

TINY = 1e-12
"""A hidden state shorter than this is divided by it, as `torch.nn.functional.normalize` does."""


class _ModuleEntry(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        """Its class."""
        return self.type.rpartition(".")[2]


class _Pooling(msgspec.Struct):
    pooling_mode_lasttoken: bool = False
    pooling_mode: str | None = None
    include_prompt: bool = True


class _ModelConfig(msgspec.Struct):
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] = []
    hidden_size: int = 0


class Embedding(msgspec.Struct, frozen=True):
    """What embeddings a checkpoint gives."""

    refusal: str | None = None
    """Why it gives none, as a clause about the endpoint; None: it does."""
    any_dimensions: bool = False
    """Whether a vector may be cut to its first numbers, however many (Matryoshka embeddings)."""
    dimensions: tuple[int, ...] = ()
    """Numbers to which a vector may be cut; empty: to none, or `any_dimensions` says to any."""
    width: int = 0
    """Numbers of a whole vector."""

    def check_dimensions(self, dimensions: int | None) -> str | None:
        """Return what is wrong with a number of dimensions that is asked for, as a clause."""
        if dimensions is None or dimensions in (*self.dimensions, self.width):
            return None
        if self.any_dimensions:
            fits = 1 <= dimensions <= self.width
            return None if fits else f"must be between 1 and {self.width}, the vector's length"
        if self.dimensions:
            return f"must be one of {', '.join(map(str, self.dimensions))}, as the model says"
        return "is not supported: config.json does not say is_matryoshka, so vectors are whole"


NO_EMBEDDING = Embedding(
    "is served for checkpoints of embeddings, such as Qwen/Qwen3-Embedding-0.6B; this model has no "
    f"{MODULES}, which would say how its hidden states become a vector"
)


def vector(state: bytes, dimensions: int | None) -> npt.NDArray[np.float32]:
    """Return an embedding of length 1.

    Args:
        state: the hidden state, in float32.
        dimensions: how many of its first numbers are the embedding; None: all.
    """
    numbers = np.frombuffer(state, np.float32)[:dimensions].astype(np.float64)
    return (numbers / max(float(np.linalg.norm(numbers)), TINY)).astype(np.float32)


def _modules(file: Path) -> list[_ModuleEntry]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[_ModuleEntry])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error


def read_embedding(directory: Path | None) -> Embedding:
    """Read what embeddings a model's folder describes; None: it has none.

    Raises:
        ValueError: a file is broken.
    """
    if directory is None or not (directory / MODULES).is_file():
        return NO_EMBEDDING
    modules = _modules(directory / MODULES)
    kinds = [module.kind for module in modules]
    other = [kind for kind in kinds if kind not in KINDS]
    if other or kinds[:2] != list(KINDS[:2]):
        return Embedding(f"is not served: {MODULES} names {', '.join(kinds)}, not {KINDS}")
    folder = PurePosixPath(modules[1].path)
    if folder.is_absolute() or ".." in folder.parts:
        raise ValueError(f"{directory / MODULES} names {folder}, which is outside its folder")
    file = directory / folder / "config.json"
    pooling = converted(read_json(file), _Pooling, str(file))
    if not (pooling.pooling_mode_lasttoken or pooling.pooling_mode == "lasttoken"):
        return Embedding("is not served: the checkpoint pools other tokens than the last one")
    config = converted(read_json(directory / "config.json"), _ModelConfig, "config.json")
    cuts = tuple(config.matryoshka_dimensions)
    return Embedding(None, config.is_matryoshka, cuts, config.hidden_size)
