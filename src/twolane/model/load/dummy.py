"""Random weights, for shapes without files."""

from collections.abc import Mapping

import torch

from twolane.model.sharding import Cut

_STD = 0.02
"""The standard deviation of random matrices."""


class Dummy:
    """Random normal matrices and norms of one, the same for the same seed and device.

    Args:
        shapes: of all tensors, by name.
        seed: of the random numbers.
        device: where they are drawn.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device
    ) -> None:
        self._shapes = shapes
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def names(self) -> list[str]:
        """See `TensorSource.names`."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self._shapes[name]

    def type(self, name: str) -> str:
        """See `TensorSource.type`."""
        return "F32"

    def get(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """See `TensorSource.get`; the whole tensor is drawn, so that parts fit together."""
        if name.endswith("norm.weight"):
            return torch.ones(self._shapes[name], device=self._device)
        tensor = torch.empty(self._shapes[name], device=self._device)
        tensor.normal_(0.0, _STD, generator=self._generator)
        return tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
