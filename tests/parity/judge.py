"""Compares greedy tokens with those of `transformers`, along the engine's own tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SURE = 1e-3
"""Where the reference's two best logits are nearer than this, either token is right."""
MAX_FORGIVEN = 1e-3
"""Share of tokens that may differ there, over a whole matrix."""


@dataclass
class Tally:
    """Over a whole matrix."""

    runs: int = 0
    tokens: int = 0
    forgiven: int = 0
    side_by_side: int = 0
    """Launches that were given to one lane while another had one."""

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.tokens} tokens compared, {self.forgiven} forgiven, "
            f"{self.side_by_side} launches side by side"
        )


@dataclass
class Judge:
    """One reference model; what it said of an output is remembered."""

    model: Callable[..., Any]
    """Called as `transformers` calls a model; what it returns has logits."""
    sure: float = SURE
    _seen: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = field(default_factory=dict)

    def forgiven(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """How many tokens are not the reference's best, where the reference is not sure.

        Raises:
            AssertionError: a token is not the reference's best where it is sure.
        """
        key = (tuple(prompt), tuple(output))
        if key not in self._seen:
            self._seen[key] = self._compare(*key)
        return self._seen[key]

    def _compare(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
        """One forward pass: each position sees the engine's tokens before it."""
        whole = torch.tensor([[*prompt, *output[:-1]]])
        with torch.inference_mode():
            logits = self.model(whole, logits_to_keep=len(output)).logits[0].float()
        best = logits.topk(2)
        gap = best.values[:, 0] - best.values[:, 1]
        other = best.indices[:, 0] != torch.tensor(output)
        wrong = torch.nonzero(other & ~(gap <= self.sure)).flatten().tolist()
        assert not wrong, (
            f"after a prompt of {len(prompt)} tokens, token {wrong[0]} is {output[wrong[0]]}; "
            f"the reference has {best.indices[wrong[0]].tolist()}, apart by {gap[wrong[0]]:.4f}"
        )
        return int(other.sum())
