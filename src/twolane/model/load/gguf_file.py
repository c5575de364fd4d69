"""GGUF files: their keys and tensors as the `gguf` package reads them, but for long lists."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType

_LENGTH = struct.Struct("<Q")
"""Format of the length of a text."""


class GGUFFile(GGUFReader):
    """An open GGUF file (memory-mapped) that reads long lists when they are asked for.

    The package makes several arrays of every entry, which takes seconds for a vocabulary.

    Args:
        path: Path of the file.

    Raises:
        ValueError: it is not a whole GGUF file, or one of another byte order.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            magic, version = file.read(4), file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{path} is not a whole GGUF file: it does not begin with GGUF")
        if version[:2] == b"\0\0":  # as llama.cpp tells it
            raise ValueError(f"{path} is big-endian; gguf-convert-endian makes it little-endian")
        try:
            super().__init__(path)
        except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            raise ValueError(f"{path} is not a whole GGUF file: {error}") from error

    def value(self, key: str) -> Any:
        """Return the value of a key as numbers, texts or a list of these; None: it is absent."""
        field = self.get_field(key)
        if field is None:
            return None
        if field.types[0] != GGUFValueType.ARRAY or field.data or len(field.parts) > 4:
            return field.contents()
        offset, count = field.parts[3].tolist()
        kind = field.types[-1]
        if kind == GGUFValueType.STRING:
            return self._texts(offset, count)
        return self._get(offset, self.gguf_scalar_to_np[kind], count).tolist()

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:
            kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            # A list with more entries than this is one of a tokenizer, not one of layers.
            if count > 1024 and kind != GGUFValueType.ARRAY:
                begin = orig_offs + 12
                end = self._end_of(begin, kind, count)
                place = np.array([begin, count])
                return end - orig_offs, [place], [], [GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)

    def _end_of(self, offset: int, kind: GGUFValueType, count: int) -> int:
        """Return where this many values of a kind end that begin at an offset."""
        if kind != GGUFValueType.STRING:
            return offset + count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        for _ in range(count):
            offset += 8 + _LENGTH.unpack_from(self.data.data, offset)[0]
        return offset

    def _texts(self, offset: int, count: int) -> list[str]:
        """Return this many texts that begin at an offset."""
        data, texts = self.data.data, []
        for _ in range(count):
            begin = offset + 8
            offset = begin + _LENGTH.unpack_from(data, offset)[0]
            texts.append(str(data[begin:offset], encoding="utf-8"))
        return texts
