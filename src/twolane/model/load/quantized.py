"""Quantised modules of public checkpoints as matrices."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from twolane.model import fp8, int4
from twolane.model.load.quantization import Format
from twolane.model.matrix import GROUPS, Matrix, in_registers, quantised
from twolane.model.mxfp4 import LARGEST_ON_GPU


def read_module(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """Return the matrix of a module.

    Args:
        format: The format in which the module is stored.
        tensors: The module's tensors by the end of their names, shaped as `format.tensors` says.

    Raises:
        ValueError: a number in a tensor cannot be; the message begins with the tensor's name.
    """
    matrix = _READERS[format.kind](format, tensors)
    if matrix.scheme == "mxfp4":
        if bool((tensors["scales"] == _NAN).any()):
            raise ValueError("scales has scales that are not numbers")
        return matrix
    name = "scales" if format.kind in ("awq", "gptq") else format.scales
    scales = tensors[name] if matrix.scales is None else matrix.scales  # None: act-order
    signed = format.kind in ("awq", "gptq", "packed")  # AutoRound makes use of both signs
    if not bool((scales.isfinite() & ((scales != 0) if signed else (scales > 0))).all()):
        which = "0 or not finite" if signed else "not above 0 and finite"
        raise ValueError(f"{name} has scales that are {which}")
    if matrix.values.dtype == fp8.E4M3 and bool(matrix.values.isnan().any()):
        raise ValueError("weight has values that are not numbers")
    return matrix


def for_gpu(matrix: Matrix, dtype: torch.dtype, *, four_bits: bool = True) -> Matrix:
    """Return a matrix in the form that products on a GPU take.

    Blocks of e4m3 get a scale for each row instead. The numbers that are meant, in `dtype`, take
    the place of what products do not multiply with: values with scales where `dtype` is not
    bfloat16, e4m3 whose rows or columns are no multiple of 16, and four bits whose columns are none
    of 128, or without `four_bits`. MXFP4 stays as it is, in the order of its kernel.
    """
    if matrix.scales is None:
        return matrix
    if matrix.scheme == "mxfp4" and int(matrix.scales.max()) <= LARGEST_ON_GPU:
        return in_registers(matrix)
    int4 = matrix.scheme.startswith("int4")
    whole = all(size % 16 == 0 for size in matrix.shape)
    whole &= not int4 or (four_bits and matrix.shape[1] % 128 == 0)
    if not whole or dtype != torch.bfloat16 or matrix.scheme == "mxfp4":
        return Matrix.plain(matrix.dequantised().to(dtype))
    if int4:
        return in_registers(matrix)
    return (
        matrix if matrix.scheme == "fp8_channel" else quantised(matrix.dequantised(), "fp8_channel")
    )


def _fp8_block(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    return Matrix(tensors["weight"], "fp8_block128", tensors[format.scales].float())


def _fp8_scale(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """Read a matrix with a scale for each row, or with one for all, which becomes one for each."""
    values, scales = tensors["weight"], tensors[format.scales].float().flatten()
    return Matrix(values, "fp8_channel", scales.expand(len(values)).contiguous())


def _awq(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """Read a matrix stored as [columns, rows], eight rows in a word."""
    # The column, among eight, of each four bits of a word that AWQ packs, lowest bits first.
    order = torch.tensor((0, 2, 4, 6, 1, 3, 5, 7)).argsort()
    numbers, *zeros = (
        _halves(tensors[name]).view(len(tensors[name]), -1, 8)[:, :, order].flatten(1).t()
        for name in ("qweight", "qzeros")
        if name in tensors
    )
    if format.centred and any(bool((each != int4.MIDDLE).any()) for each in zeros):
        raise ValueError("qzeros has zero points, but zero_point is false")
    return _int4(format, numbers, tensors["scales"].t(), zeros[0] if zeros else None)


def _gptq(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """Read [columns, rows]: words of eight columns, and for zeros of eight rows."""
    numbers, scales = _halves(tensors["qweight"].t()), tensors["scales"].t()
    zeros = _halves(_zero_words(format, tensors["qzeros"])).t()
    return _ordered(format, numbers, scales, zeros, tensors, "g_idx")


def _zero_words(format: Format, words: Tensor) -> Tensor:
    """Return the words of zero points as they are meant.

    One is added to whole words, as the writers take it away: a carry goes to the next number. Some
    of them name the first format and store the second, and the other way round. Where all zero
    points are said to be in the middle, either shows which it is.
    """
    if format.centred and any(bool((words == all_of).all()) for all_of in _CENTRED):
        return torch.full_like(words, _CENTRED[1])
    return words + _ONES if format.old_zeros else words


_ONES = 0x11111111
"""A word of eight numbers that are 1."""
_CENTRED = 0x77777777, 0x88888888 - 2**32
"""Words of eight zero points in the middle, in GPTQ's first format and in its second."""


def _packed(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """Read [rows, columns]: words of eight columns, and for zeros of eight rows."""
    numbers, zeros = _halves(tensors["weight_packed"]), None
    if tuple(tensors["weight_shape"].tolist()) != tuple(numbers.shape):
        raise ValueError(
            f"weight_shape is {tensors['weight_shape'].tolist()}, "
            f"but weight_packed holds {list(numbers.shape)}"
        )
    if not format.symmetric:
        zeros = _halves(tensors["weight_zero_point"].t()).t()
    return _ordered(format, numbers, tensors["weight_scale"], zeros, tensors, "weight_g_idx")


_UNORDERED = {"g_idx": "desc_act is false", "weight_g_idx": "actorder is not group"}
"""The config's setting for columns in their usual order, by the tensor that would order them."""


def _ordered(
    format: Format,
    numbers: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    tensors: Mapping[str, Tensor],
    name: str,
) -> Matrix:
    """Return the matrix of numbers [rows, columns] whose groups this tensor assigns, if it is
    there.

    With act-order, where groups are no neighbours, the numbers that are meant.
    """
    columns = numbers.shape[1]
    usual = torch.arange(columns) // (format.group or columns)
    index = tensors[name].long() if name in tensors else usual
    if torch.equal(index, usual) or not bool(index.any()):  # zeros: the writer knows no others
        return _int4(format, numbers, scales, zeros)
    if not format.ordered:
        raise ValueError(f"{name} orders columns by activations, but {_UNORDERED[name]}")
    if not bool(((index >= 0) & (index < scales.shape[1])).all()):
        raise ValueError(f"{name} names others than the {scales.shape[1]} groups")
    middle = torch.full_like(scales, int4.MIDDLE) if zeros is None else zeros.float()
    return Matrix.plain((numbers.float() - middle[:, index]) * scales.float()[:, index])


def _mxfp4(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """Read groups of 16 bytes, even columns in the low half of each."""
    return Matrix(tensors["blocks"].flatten(1), "mxfp4", tensors["scales"])


_NAN = 255
"""The stored exponent of a scale that is no number (e8m0)."""
_READERS: dict[str, Callable[[Format, Mapping[str, Tensor]], Matrix]] = {
    "fp8_block": _fp8_block,
    "fp8_scale": _fp8_scale,
    "awq": _awq,
    "gptq": _gptq,
    "packed": _packed,
    "mxfp4": _mxfp4,
}


def _halves(words: Tensor) -> Tensor:
    """uint8 [n, 8 * m] of words, int32 [n, m]: their four-bit numbers, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _int4(format: Format, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Matrix:
    """Return a matrix of numbers [rows, columns] with scales and zeros [rows, groups].

    Groups that are wider than the widest scheme's are cut into several with the same scale.
    """
    columns = numbers.shape[1]
    group = format.group or max(size for size in GROUPS if columns % size == 0)
    copies = columns // group // scales.shape[1]
    scales = scales.float().repeat_interleave(copies, dim=1).contiguous()
    if zeros is not None:
        zeros = zeros.repeat_interleave(copies, dim=1).contiguous()
        if bool((zeros == int4.MIDDLE).all()):
            zeros = None
    return Matrix(int4.pack(numbers), GROUPS[group], scales, zeros)
