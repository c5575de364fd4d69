"""Tables of prompt and reply lengths, from which realistic ones are drawn without a trace.

Each table holds quantiles that we computed from a public data set, not the data itself. Lengths
are drawn by the inverse of the distribution function, linear between the quantiles; prompt and
reply independently (their correlation is below 0.12 in all three sets).

Sources:

- azure-code, azure-conv: AzureLLMInferenceTrace_code.csv (8,819 requests) and _conv.csv (19,366
  requests) of the Azure Public Dataset, Microsoft, CC-BY 4.0; described in Patel et al.,
  "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA 2024.
- sharegpt: prompt and reply lengths of 58,787 ShareGPT conversations as distributed with
  NanoFlow (Zhu et al., "NanoFlow: Towards Optimal Large Language Model Serving Throughput",
  OSDI 2025). A handful of prompts are up to 241,402 tokens long; clip them for a model that could
  not take them anyway.
"""

from pathlib import Path

import msgspec
import numpy as np

from twolane.common.checked_json import read_tables
from twolane.workload.draws import spread
from twolane.workload.traces import TraceRequest

PERCENT = (
    0, 1, 2, 5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92.5, 95, 97, 98, 99, 99.5, 99.8,
    99.9, 99.95, 99.99, 99.995, 99.999, 100,
)  # fmt: skip
"""Quantiles of every table, in percent."""


class LengthTable(msgspec.Struct, frozen=True):
    """Quantiles of prompt and reply lengths, in tokens, at `PERCENT`."""

    source: str
    licence: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    def draw(self, count: int, seed: int) -> list[TraceRequest]:
        """Return `count` requests without arrival times.

        Lengths are whole tokens between the table's minimum and maximum. The first n of a longer
        draw are the draw of n.
        """
        rng = np.random.default_rng([seed, _LENGTHS])
        prompts, outputs = (
            np.rint(np.interp(draw * 100, PERCENT, column)).astype(int).tolist()
            for draw, column in zip(spread(rng, count, 2), (self.prompt, self.output), strict=True)
        )
        pairs = zip(prompts, outputs, strict=True)
        return [TraceRequest(None, prompt, output) for prompt, output in pairs]


TABLES = read_tables(Path(__file__).with_name("lengths.toml"), LengthTable)
"""The tables by the names of their data sets."""
_LENGTHS = 0x4C454E47
"""Seed offset that separates the draws of lengths from those of arrivals and tokens."""
