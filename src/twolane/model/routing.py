"""Routing of tokens to experts."""

import torch
from torch import Tensor

from twolane.kernels.experts.rule import RoutingRule


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and the weights of their outputs.

    Scores are in float32. Of equally good experts the lower number goes first, so that a token's
    experts depend on its logits alone.

    Args:
        logits: [T, rule.logits], of the router.
        rule: The model's rule.
        bias: float32 [rule.experts], if the rule has one.

    Returns:
        Weights, float32 [T, rule.entries], and experts, int64 [T, rule.entries].
    """
    wide = logits.float()
    scores = wide[:, : rule.experts]
    scores = scores.sigmoid() if rule.sigmoid else torch.softmax(scores, dim=1)
    liked = scores if bias is None else scores + bias
    chosen = liked.sort(dim=1, descending=True, stable=True).indices[:, : rule.chosen]
    weights = scores.gather(1, chosen)
    if rule.normalised:
        weights = weights / weights.sum(dim=1, keepdim=True)
    weights = weights * rule.scale
    if not rule.shared:
        return weights, chosen
    numbers = torch.arange(rule.experts, rule.stored, device=logits.device)
    counted = wide[:, -1:].sigmoid() if rule.gated else torch.ones_like(wide[:, -1:])
    return (
        torch.cat([weights, counted.expand(-1, rule.shared)], dim=1),
        torch.cat([chosen, numbers.expand(len(logits), -1)], dim=1),
    )
