"""Quantised linear modules of a checkpoint, and the tensors of each. No torch."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

BLOCK = 128
"""Rows and columns of the only blocks of FP8 that are read."""
MX_GROUP = 32
"""Columns that share a scale in MXFP4."""
FLOATS = ("F32", "BF16", "F16", "F64")
"""Types of tensors that are no quantised values, as safetensors names them."""
_POWERS = ("F8_E8M0",)
"""The type of scales that are powers of two, stored as their exponents."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that a checkpoint has."""

    shapes: tuple[tuple[int, ...], ...]
    """The shapes that it may have."""
    types: tuple[str, ...] = FLOATS
    """The types that it may have, as safetensors names them."""
    optional: bool = False
    """Whether the checkpoint may lack it."""


@dataclass(frozen=True)
class Format:
    """A storage format of a linear module."""

    kind: Literal["fp8_block", "fp8_scale", "awq", "gptq", "packed", "mxfp4"]
    """The layout of its tensors."""
    name: str
    """Name of the format in the checkpoint's config."""
    group: int = BLOCK
    """Columns that share a scale, in schemes of four bits; 0: all columns."""
    symmetric: bool = True
    """Whether a scheme of four bits has no zero points."""
    old_zeros: bool = False
    """Whether stored zero points are one less than those that are meant (GPTQ's first format)."""
    centred: bool = False
    """Whether the config says that every zero point is the middle (`sym`, no `zero_point`)."""
    ordered: bool = False
    """Whether columns may belong to groups that are no neighbours (act-order)."""
    scales: str = "weight_scale"
    """The end of the name of the scales of FP8."""

    def tensors(self, rows: int, columns: int) -> Mapping[str, StoredTensor]:
        """Return the tensors of a module [rows, columns], by the end of their names.

        Raises:
            ValueError: a module of this shape cannot be stored so.
        """
        if self.kind == "fp8_block":
            blocks = -(-rows // BLOCK), -(-columns // BLOCK)
            return {
                "weight": StoredTensor(((rows, columns),), ("F8_E4M3",)),
                self.scales: StoredTensor((blocks,), (*FLOATS, *_POWERS)),
            }
        if self.kind == "fp8_scale":
            return {
                "weight": StoredTensor(((rows, columns),), ("F8_E4M3",)),
                self.scales: StoredTensor(((rows, 1), (rows,), (1,), (), (1, 1))),
            }
        if self.kind == "mxfp4":
            return self._mxfp4(rows, columns)
        return self._four_bits(rows, columns)

    def _mxfp4(self, rows: int, columns: int) -> Mapping[str, StoredTensor]:
        """See `tensors`."""
        if columns % MX_GROUP:
            raise ValueError(f"{columns} columns are no whole groups of {MX_GROUP}")
        groups = columns // MX_GROUP
        return {
            "blocks": StoredTensor(((rows, groups, MX_GROUP // 2),), ("U8",)),
            "scales": StoredTensor(((rows, groups),), ("U8",)),
        }

    def _four_bits(self, rows: int, columns: int) -> Mapping[str, StoredTensor]:
        """See `tensors`."""
        groups = self._groups(rows, columns)
        words, wholes = rows // 8, ("I32",)
        if self.kind == "awq":
            return {
                "qweight": StoredTensor(((columns, words),), wholes),
                "qzeros": StoredTensor(((groups, words),), wholes, optional=self.centred),
                "scales": StoredTensor(((groups, rows),)),
            }
        if self.kind == "gptq":
            return {
                "qweight": StoredTensor(((columns // 8, rows),), wholes),
                "qzeros": StoredTensor(((groups, words),), wholes),
                "scales": StoredTensor(((groups, rows),)),
                "g_idx": StoredTensor(((columns,),), wholes, optional=not self.ordered),
            }
        tensors = {
            "weight_packed": StoredTensor(((rows, columns // 8),), wholes),
            "weight_scale": StoredTensor(((rows, groups),)),
            "weight_shape": StoredTensor(((2,),), ("I64", "I32")),
            # Left out where columns are in their usual order, whatever the config says.
            "weight_g_idx": StoredTensor(((columns,),), wholes, optional=True),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = StoredTensor(((words, groups),), wholes)
        return tensors

    def _groups(self, rows: int, columns: int) -> int:
        """Groups of a row.

        Raises:
            ValueError: groups, or words of eight numbers, do not divide the shape.
        """
        group = self.group or columns
        words_of_rows = self.kind != "packed" or not self.symmetric
        if (words_of_rows and rows % 8) or columns % 32 or columns % group:
            raise ValueError(
                f"a matrix of {rows} x {columns} has no whole groups of {group} columns "
                "and words of eight numbers"
            )
        return columns // group


@dataclass(frozen=True)
class ModuleGroup:
    """A group of modules of one format."""

    format: Format
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Quantization:
    """The quantised linear modules and their formats."""

    groups: tuple[ModuleGroup, ...]
    """Groups of quantised modules; empty where a KV cache alone is quantised, or nothing."""
    ignored: tuple[str, ...]
    """Modules that are left in 16 bits, by name or pattern."""
    head: bool
    """Whether the classifier counts as a linear module."""
    by_pattern: bool
    """Whether a name without "re:" before a pattern is whole; otherwise it means all below it."""
    unused: tuple[str, ...] = ()
    """Ends of the names of calibrated scales that the checkpoint may have. They are not used, for
    ours follow the numbers of each token."""
    stored: Mapping[str, Format | None] = field(default_factory=dict)
    """Formats of modules that differ from what the lists say (`with_stored_formats`)."""

    @property
    def name(self) -> str:
        """Name of the format in the config."""
        if self.groups:
            return self.groups[0].format.name
        return "floats, for a KV cache of 8 bits" if self.unused else "floats"

    @property
    def scheme(self) -> Literal["fp8_block128", "fp8_channel", "int4_g128", "mxfp4"] | None:
        """The scheme of matrices that dummy weights get in place of the checkpoint's."""
        if not self.groups:
            return None
        kind = self.groups[0].format.kind
        if kind == "fp8_block":
            return "fp8_block128"
        if kind == "mxfp4":
            return "mxfp4"
        return "fp8_channel" if kind == "fp8_scale" else "int4_g128"

    @property
    def four_bits(self) -> bool:
        """Whether the quantised modules have four bits."""
        return self.scheme in ("int4_g128", "mxfp4")

    def format(self, module: str) -> Format | None:
        """Return the format of a linear module; None: in 16 bits."""
        if module in self.stored:
            return self.stored[module]
        return next(iter(self.named(module)), None)

    def named(self, module: str) -> Sequence[Format]:
        """Return the formats that the lists name for a linear module, the one that holds first."""
        if module not in self._known:
            self._known[module] = self._look_up(module)
        return self._known[module]

    def _look_up(self, module: str) -> Sequence[Format]:
        if (module == "lm_head" and not self.head) or self._left.mean(module):
            return ()
        fitting = [(n.rank(module), group) for group, n in self._targets if n.mean(module)]
        return [group.format for _, group in sorted(fitting, key=lambda each: each[0])]

    def formats(self, module: str) -> Iterable[Format | None]:
        """Return the formats that a linear module may have, those of the lists first."""
        all_groups = (group.format for group in self.groups)
        return dict.fromkeys((*self.named(module), None, *all_groups))

    @cached_property
    def _known(self) -> dict[str, Sequence[Format]]:
        """Formats that the lists name, by module that was asked for."""
        return {}

    @cached_property
    def _left(self) -> "_Names":
        return _Names(self.ignored, by_pattern=self.by_pattern)

    @cached_property
    def _targets(self) -> "Sequence[tuple[ModuleGroup, _Names]]":
        return [(one, _Names(one.targets, by_pattern=self.by_pattern)) for one in self.groups]


class _Names:
    """Names and patterns of modules; a look-up takes as long however many names there are.

    Args:
        names: Names and patterns, as a config has them.
        by_pattern: see `Quantization.by_pattern`.
    """

    def __init__(self, names: Sequence[str], *, by_pattern: bool) -> None:
        self._plain = frozenset(name for name in names if not name.startswith("re:"))
        self._patterns = [re.compile(name[3:]) for name in names if name.startswith("re:")]
        self._parts = not by_pattern

    def mean(self, module: str) -> bool:
        """Return whether they mean a module."""
        if "Linear" in self._plain or module in self._plain:
            return True
        if any(pattern.match(module) for pattern in self._patterns):
            return True
        return self._parts and any(part in self._plain for part in _parts(module))

    def rank(self, module: str) -> int:
        """Return 0 if they name a module, 1 if a pattern means it, 2 if all linear modules are
        meant: the first of these holds, in whatever order groups are written."""
        if module in self._plain:
            return 0
        return 2 if "Linear" in self._plain else 1


def _parts(module: str) -> Iterator[str]:
    """Yield what a name has between two of its points, its begin and its end."""
    words = module.split(".")
    for first in range(len(words)):
        for last in range(first, len(words)):
            yield ".".join(words[first : last + 1])
