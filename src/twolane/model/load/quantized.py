"""Quantised modules of public checkpoints as matrices."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from twolane.model import fp8, int4
from twolane.model.load.quantization import Format
from twolane.model.matrix import GROUPS, Matrix, in_registers, quantised

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, among eight, of each four bits of a word that AWQ packs, lowest bits first."""


def read_module(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """The matrix of a module.

    Args:
        format: how it is stored.
        tensors: its tensors by the end of their names, shaped as `format.tensors` says.

    Raises:
        ValueError: a number in a tensor cannot be; the message begins with the tensor's name.
    """
    matrix = _READERS[format.kind](format, tensors)
    scales = tensors["scales"] if matrix.scales is None else matrix.scales  # None: act-order
    if not bool((scales.isfinite() & (scales > 0)).all()):
        name = format.scales if format.kind == "fp8_block" else _SCALES[format.kind]
        raise ValueError(f"{name} has scales that are not above 0 and finite")
    if matrix.values.dtype == fp8.E4M3 and bool(matrix.values.isnan().any()):
        raise ValueError("weight has values that are not numbers")
    return matrix


def for_gpu(matrix: Matrix, dtype: torch.dtype, *, four_bits: bool = True) -> Matrix:
    """A matrix as products on a GPU take it.

    Blocks of e4m3 get a scale for each row instead. The numbers that are meant, in `dtype`, take
    the place of what products do not multiply with: values with scales where `dtype` is not
    bfloat16, e4m3 whose rows or columns are no multiple of 16, and four bits whose columns are none
    of 128, or without `four_bits`.
    """
    if matrix.scales is None:
        return matrix
    int4 = matrix.scheme.startswith("int4")
    whole = all(size % 16 == 0 for size in matrix.shape)
    whole &= not int4 or (four_bits and matrix.shape[1] % 128 == 0)
    if not whole or dtype != torch.bfloat16:
        return Matrix.plain(matrix.dequantised().to(dtype))
    if int4:
        return in_registers(matrix)
    return (
        matrix if matrix.scheme == "fp8_channel" else quantised(matrix.dequantised(), "fp8_channel")
    )


_SCALES = {
    "fp8_scale": "weight_scale",
    "awq": "scales",
    "gptq": "scales",
    "packed": "weight_scale",
}
"""The end of the name of the scales of each kind of format."""


def _fp8_block(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    return Matrix(tensors["weight"], "fp8_block128", tensors[format.scales].float())


def _fp8_scale(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """One scale for each row, or for all of them, which becomes one for each."""
    values, scales = tensors["weight"], tensors["weight_scale"].float().flatten()
    return Matrix(values, "fp8_channel", scales.expand(len(values)).contiguous())


def _awq(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """[columns, rows], eight rows in a word."""
    order = torch.tensor(_AWQ_ORDER).argsort()
    numbers, zeros = (
        _halves(tensors[name]).view(len(tensors[name]), -1, 8)[:, :, order].flatten(1).t()
        for name in ("qweight", "qzeros")
    )
    return _int4(format, numbers, tensors["scales"].t(), zeros)


def _gptq(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """[columns, rows], eight columns in a word of the numbers, eight rows in one of the zeros.

    With act-order, where groups are no neighbours, the numbers that are meant.
    """
    numbers, scales = _halves(tensors["qweight"].t()), tensors["scales"].t()
    zeros = (_halves(tensors["qzeros"]).t() + format.old_zeros) & 15
    columns = numbers.shape[1]
    neighbours = torch.arange(columns, device=numbers.device) // (format.group or columns)
    index = tensors["g_idx"].long() if "g_idx" in tensors else neighbours
    if torch.equal(index, neighbours):
        return _int4(format, numbers, scales, zeros)
    if not format.ordered:
        raise ValueError("g_idx orders columns by activations, but desc_act is false")
    if not bool(((index >= 0) & (index < scales.shape[1])).all()):
        raise ValueError(f"g_idx names others than the {scales.shape[1]} groups")
    return Matrix.plain((numbers.float() - zeros.float()[:, index]) * scales.float()[:, index])


def _packed(format: Format, tensors: Mapping[str, Tensor]) -> Matrix:
    """[rows, columns], eight columns in a word of the numbers, eight rows in one of the zeros."""
    numbers, zeros = _halves(tensors["weight_packed"]), None
    if tuple(tensors["weight_shape"].tolist()) != tuple(numbers.shape):
        raise ValueError(
            f"weight_shape is {tensors['weight_shape'].tolist()}, "
            f"but weight_packed holds {list(numbers.shape)}"
        )
    if not format.symmetric:
        zeros = _halves(tensors["weight_zero_point"].t()).t()
    return _int4(format, numbers, tensors["weight_scale"], zeros)


_READERS: dict[str, Callable[[Format, Mapping[str, Tensor]], Matrix]] = {
    "fp8_block": _fp8_block,
    "fp8_scale": _fp8_scale,
    "awq": _awq,
    "gptq": _gptq,
    "packed": _packed,
}


def _halves(words: Tensor) -> Tensor:
    """uint8 [n, 8 * m] of words, int32 [n, m]: their four-bit numbers, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _int4(format: Format, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Matrix:
    """Numbers [rows, columns] with scales and zeros [rows, groups].

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
