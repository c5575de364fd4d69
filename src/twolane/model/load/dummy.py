"""Random weights, for shapes without files."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from twolane.model.sharding import Cut

STD = 0.02
"""The standard deviation of random matrices, unless a tensor has one of its own."""


class Dummy:
    """Random normal matrices and norms of one, the same for the same seed and device.

    Args:
        shapes: Shapes of all tensors, by name.
        seed: Seed of the random numbers.
        device: The device on which the numbers are drawn.
        routers: names of the routers' tensors.
        shares: probability that a token goes to each expert; none: routers are like other matrices.
        deviations: standard deviations of tensors that do not have `STD`, by name.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        device: torch.device,
        routers: Collection[str] = (),
        shares: Sequence[float] = (),
        deviations: Mapping[str, float] | None = None,
    ) -> None:
        self._shapes = shapes
        self._deviations = deviations or {}
        self._device = device
        self._routers = frozenset(routers)
        self._scales = router_scales(shares).to(device) if shares else None
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

    def get(self, name: str, cut: Cut | None = None) -> Tensor:
        """See `TensorSource.get`; the whole tensor is drawn, so that parts fit together."""
        if name.endswith("correction_bias"):  # all experts are liked alike
            return torch.zeros(self._shapes[name], device=self._device)
        if len(self._shapes[name]) == 1 and not name.endswith(".bias"):  # norms, and other factors
            return torch.ones(self._shapes[name], device=self._device)
        tensor = torch.empty(self._shapes[name], device=self._device)
        tensor.normal_(0.0, self._deviations.get(name, STD), generator=self._generator)
        if name in self._routers and self._scales is not None:
            tensor *= self._scales[:, None]
        return tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)


def router_scales(shares: Sequence[float]) -> Tensor:
    """Factors of a router's rows with which tokens go to the experts with these probabilities.

    The logits of a row times s are normal with a deviation of s. Where there are many experts, the
    least logit that is chosen is nearly the same for all tokens, so that an expert is chosen with
    probability q if that least logit is s times the normal distribution's (1 - q) quantile.
    """
    quantiles = torch.special.ndtri(1.0 - torch.tensor(shares, dtype=torch.float64))
    scales: Tensor = quantiles.max() / quantiles
    return scales.float()
