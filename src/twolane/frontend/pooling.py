"""Embeddings of a checkpoint in the format of `sentence-transformers`."""

from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
import numpy.typing as npt

from twolane.common.checked_json import converted, read_json

MODULES = "modules.json"
KINDS = ("Transformer", "Pooling", "Normalize")
"""Supported modules, in this order; the last may be missing, since all vectors are normalised."""

TINY = 1e-12
"""Smallest norm that a hidden state is divided by, as in `torch.nn.functional.normalize`."""


class _ModuleEntry(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        """Class of the module."""
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
    """The embeddings of a checkpoint."""

    refusal: str | None = None
    """Reason why it has none, as a clause about the endpoint; None: it has them."""
    any_dimensions: bool = False
    """Whether a vector may be cut to any length (Matryoshka embeddings)."""
    dimensions: tuple[int, ...] = ()
    """Lengths that a vector may be cut to; empty: none, or any with `any_dimensions`."""
    width: int = 0
    """Length of a complete vector."""

    def check_dimensions(self, dimensions: int | None) -> str | None:
        """Return what is wrong with a requested number of dimensions, as a clause; None:
        nothing."""
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
    """Return a hidden state as an embedding of norm 1.

    Args:
        state: the hidden state, in float32.
        dimensions: number of its first numbers to keep; None: all.
    """
    numbers = np.frombuffer(state, np.float32)[:dimensions].astype(np.float64)
    return (numbers / max(float(np.linalg.norm(numbers)), TINY)).astype(np.float32)


def _modules(file: Path) -> list[_ModuleEntry]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[_ModuleEntry])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error


def read_embedding(directory: Path | None) -> Embedding:
    """Read the embeddings that a model's folder describes; None: no folder.

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
