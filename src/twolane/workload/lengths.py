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

import msgspec
import numpy as np

from twolane.workload.draws import spread
from twolane.workload.traces import TraceRequest

# fmt: off
PERCENT = (
    0, 1, 2, 5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 85, 90, 92.5, 95, 97, 98, 99, 99.5, 99.8,
    99.9, 99.95, 99.99, 99.995, 99.999, 100,
)
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


TABLES = {
    "azure-code": LengthTable(
        source="Azure Public Dataset, AzureLLMInferenceTrace_code (2023)",
        licence="CC-BY 4.0",
        prompt=(3, 17, 35, 75, 147, 386, 578, 770, 1075, 1469, 1909, 2433, 2744, 3192, 3920,
                5188, 6097, 7303, 7435, 7436, 7436, 7436, 7436, 7437, 7437, 7437, 7437, 7437, 7437),
        output=(6, 6, 6, 6, 7, 8, 9, 9, 11, 13, 16, 20, 24, 29, 39, 55, 69, 90, 128, 171, 251,
                359, 670, 825, 885, 1350, 1624, 1844, 1899),
    ),
    "azure-conv": LengthTable(
        source="Azure Public Dataset, AzureLLMInferenceTrace_conv (2023)",
        licence="CC-BY 4.0",
        prompt=(2, 29, 91, 181, 207, 387, 396, 403, 703, 1020, 1071, 1130, 1189, 1315, 1876,
                2734, 4075, 4083, 4090, 4098, 4142, 4831, 5652, 6179, 6570, 7668, 8124, 12865,
                14050),
        output=(7, 16, 24, 41, 54, 77, 85, 91, 103, 129, 177, 384, 395, 400, 411, 424, 430, 451,
                509, 540, 601, 643, 917, 954, 1000, 1000, 1000, 1000, 1000),
    ),
    "sharegpt": LengthTable(
        source="ShareGPT conversations, lengths as distributed with NanoFlow (OSDI '25)",
        licence="quantiles computed here; no text or record of the data set is included",
        prompt=(1, 2, 3, 7, 9, 13, 16, 18, 25, 36, 58, 106, 158, 258, 448, 829, 1158, 1625, 2275,
                2736, 3473, 4130, 5853, 7887, 10803, 36507, 79412, 163468, 241402),
        output=(1, 5, 10, 20, 39, 102, 130, 161, 224, 280, 338, 404, 445, 501, 573, 683, 760,
                846, 919, 955, 999, 1041, 1090, 1153, 1336, 3318, 3502, 19604, 37622),
    ),
}
# fmt: on


_LENGTHS = 0x4C454E47
"""Seed offset that separates the draws of lengths from those of arrivals and tokens."""
