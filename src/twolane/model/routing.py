"""Routing of tokens to experts."""

import torch
from torch import Tensor


def route(logits: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and the weights of their outputs.

    Probabilities are a softmax in float32. Of equally likely experts the lower number goes first,
    so that a token's experts depend on its logits alone.

    Args:
        logits: [T, experts], of the router.
        per_token: experts of each token.
        normalised: Whether the chosen experts' probabilities are divided by their sum.

    Returns:
        Weights, float32 [T, per_token], and experts, int64 [T, per_token], the likeliest first.
    """
    likely = torch.softmax(logits.float(), dim=1)
    weights, experts = (t[:, :per_token] for t in likely.sort(dim=1, descending=True, stable=True))
    if normalised:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, experts
