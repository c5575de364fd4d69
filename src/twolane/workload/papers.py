"""Workloads of the papers, drawn from the statistics that they publish.

So that anyone can run them without the data. A paper gives minimum, mean and maximum, or median and
P90; the shape in between is a lognormal whose width is ours. Prompt and reply are independent.

- sharegpt-1k, loogle, openthoughts, conversation, toolagent: MuxWise, Table 1 (k = 1,024 there:
  its 123k is the 126,195 of the trace). Its input length of Conversation is the new part (7,538 and
  4,496 reused make the trace's 12,035); that of Tool&Agent is the whole prompt, as its caption says
  and as in Mooncake (FAST '25), Table 1. Turns and pauses are shaped like Mooncake's trace.
- arxiv-sum: Sarathi-Serve (OSDI '24), Table 2: median and P90; Bullet has the data set as a figure.

Azure's two and all of ShareGPT are tables of quantiles, in `lengths.py`.
"""

from pathlib import Path

import msgspec
import numpy as np

from twolane.workload.draws import Lengths, spread
from twolane.workload.sessions import Sessions
from twolane.workload.traces import TraceRequest


class Single(msgspec.Struct, frozen=True):
    """Single-turn requests without arrival times."""

    prompt: Lengths
    """Tokens of a prompt, without the shared prefix."""
    output: Lengths
    shared: int = 0
    """Tokens of the prefix that all prompts share."""

    def draw(self, count: int, seed: int) -> list[TraceRequest]:
        """Return `count` requests; the first n of a longer draw are the draw of n."""
        rng = np.random.default_rng([seed, _SINGLE])
        prompts, outputs = spread(rng, count, 2)
        pairs = zip(self.prompt.at(prompts).tolist(), self.output.at(outputs).tolist(), strict=True)
        return [
            self._request(index, prompt, output) for index, (prompt, output) in enumerate(pairs)
        ]

    def _request(self, index: int, own: int, output: int) -> TraceRequest:
        if not self.shared:
            return TraceRequest(None, own, output)
        # One block is shared; those after it are this request's.
        most = -(-self.prompt.maximum // self.shared)
        first = 1 + index * most
        ids = (0, *range(first, first - (-own // self.shared)))
        return TraceRequest(None, self.shared + own, output, ids, self.shared)


class _Workloads(msgspec.Struct, frozen=True):
    single: dict[str, Single]
    sessions: dict[str, Sessions]


_READ = msgspec.toml.decode(Path(__file__).with_name("papers.toml").read_bytes(), type=_Workloads)
WORKLOADS: dict[str, Single | Sessions] = {**_READ.single, **_READ.sessions}

_SINGLE = 0x53494E47
"""Seed offset that separates the draws of single turns from others."""
