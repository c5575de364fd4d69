"""The safetensors files of a model directory."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from twolane.common.checked_json import converted, read_json
from twolane.model.families.family import text_name
from twolane.model.sharding import Cut

_PARTS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower")
_IMAGES = tuple(
    f"{place}{part}."
    for part in (*_PARTS, "embed_vision", "embed_audio")
    for place in ("", "model.")
)
"""Names of its other parts begin with one of these."""
INDEX = "model.safetensors.index.json"
_LINEAR = ".linear_attn."
"""Part of the names of norms that are stored as they are, whatever the others are."""
_LFS = b"version https://git-lfs"
"""Beginning of a file of Git LFS whose content has not been fetched."""
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
MAX_SHARDS = 10_000
"""Most numbered files of a model that are looked for."""
_OF_OTHERS = ("consolidated", "adapter_model")
"""Names of files in a model's folder begin so that are not the model in the form that is read."""


class Safetensors:
    """The tensors of a directory's safetensors files, memory-mapped.

    Args:
        directory: The directory of a model.
        stack: Closes the files.
        vision: Whether tensors that read images are left out.
        norms_less_1: End of the names of norms whose weights are stored less 1; empty: there are
            none.

    Raises:
        ValueError: a file is missing or broken, or it is not clear which of two has a tensor.
    """

    def __init__(
        self, directory: Path, stack: ExitStack, *, vision: bool = False, norms_less_1: str = ""
    ) -> None:
        self._norms_less_1 = norms_less_1
        self._files: dict[str, tuple[Any, str]] = {}
        """The file of each tensor, and its name there."""
        paths, places = _model_files(directory)
        self.indexed = {*map(text_name, places)}
        """The tensors that an index names; files may have others, which are out of date."""
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path.parent} lacks {path.name}, which its index names")
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:  # safetensors raises its own type, derived from Exception
                raise ValueError(f"{path} {_broken(path)}: {error}") from error
            for name in file.keys():  # noqa: SIM118, it is no mapping
                if vision and name.startswith(_IMAGES):
                    continue
                known = text_name(name) in self._files
                if known and name not in places:
                    raise ValueError(f"{path} has {name}, and so has another file of the model")
                if not known or places[name] == path:
                    self._files[text_name(name)] = file, name

    def names(self) -> list[str]:
        """See `TensorSource.names`."""
        return list(self._files)

    def rename(self, name: str, new: str) -> None:
        """Rename a tensor."""
        self._files[new] = self._files.pop(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        file, stored = self._files[name]
        return tuple(file.get_slice(stored).get_shape())

    def type(self, name: str) -> str:
        """See `TensorSource.type`."""
        file, stored = self._files[name]
        return str(file.get_slice(stored).get_dtype())

    def get(self, name: str, cut: Cut | None = None) -> Tensor:
        """See `TensorSource.get`; of a part no more is read."""
        file, stored = self._files[name]
        tensor: Tensor
        if cut is None:
            tensor = file.get_tensor(stored)
        elif cut.dim == 0:
            tensor = file.get_slice(stored)[cut.start : cut.stop]
        else:
            tensor = file.get_slice(stored)[:, cut.start : cut.stop]
        ending = self._norms_less_1
        less_1 = ending and name.endswith(ending) and _LINEAR not in name
        return tensor.float() + 1.0 if less_1 else tensor


def loaded_tensors(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file that has been read.

    Raises:
        ValueError: it is broken.
    """
    try:
        tensors: dict[str, Tensor] = load(content)
    except Exception as error:  # safetensors raises its own type, derived from Exception
        raise ValueError(f"{path} {_broken(path)}: {error}") from error
    return tensors


def _broken(path: Path) -> str:
    """Return what is wrong with a file that cannot be opened."""
    with path.open("rb") as file:
        pointer = file.read(len(_LFS)) == _LFS
    return "waits for git lfs pull" if pointer else "is not a whole safetensors file"


def _model_files(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files of a model's folder, and the file of each tensor that its index names; the
    index may name some that are not there.

    Without one they are a complete row of numbered files, or the only file.

    Raises:
        ValueError: there are none, or the index is broken or leads elsewhere.
    """
    # In this order, as in `transformers`: an index may be left from a save in shards.
    single, index = directory / "model.safetensors", directory / INDEX
    if single.is_file():
        return [single], {}
    if index.is_file():
        files = converted(read_json(index), _Index, str(index)).weight_map
        for name in {*files.values()}:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{index} names {name}, which is outside its folder")
        places = {tensor: directory / file for tensor, file in files.items()}
        return sorted({*places.values()}), places
    others = sorted(
        path for path in directory.glob("*.safetensors") if not path.name.startswith(_OF_OTHERS)
    )
    lacking = _lacking([path.name for path in others])
    if not lacking and (len(others) == 1 or lacking is not None):
        return others, {}
    if lacking:
        raise ValueError(f"{directory} lacks {lacking[0]}, one of the files of the model")
    raise ValueError(
        f"{directory} has neither model.safetensors nor {INDEX}; "
        "other weight formats than safetensors and GGUF are not read"
    )


def _lacking(names: Sequence[str]) -> list[str] | None:
    """Return which of a model's numbered files are not there; None: these are not such files."""
    shards = [_SHARD.fullmatch(name) for name in names]
    rows = {(shard["stem"], shard["count"]) for shard in shards if shard}
    if None in shards or len(rows) != 1:
        return None
    [(stem, count)] = rows
    every = (f"{stem}-{i:0{len(count)}}-of-{count}.safetensors" for i in range(1, int(count) + 1))
    return [name for name in islice(every, MAX_SHARDS) if name not in names]


class _Index(msgspec.Struct):
    """The field that is read of a `model.safetensors.index.json`."""

    weight_map: dict[str, str]
    """File by tensor."""
