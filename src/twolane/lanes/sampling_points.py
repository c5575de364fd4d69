"""Where a pass samples: after its decode rows, and after the prompts that end in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from twolane.lanes.cuda.logit_processors import SamplingPoint
from twolane.lanes.work import DecodeRow, PromptRow


@dataclass(frozen=True, slots=True)
class SamplingPoints:
    """Of one pass, whose decode rows come first."""

    rows: list[int]
    """Of the work, decode rows and then prompts: those that a token is sampled after."""
    where: list[int]
    """The row of the pass, one a token, that each is sampled at."""
    places: list[SamplingPoint]
    """Of the logits, in the same order."""
    decoding: int
    """Decode rows."""

    @classmethod
    def of(cls, decode: Sequence[DecodeRow], prompts: Sequence[PromptRow]) -> "SamplingPoints":
        """Those of a pass with such rows."""
        rows, where = list(range(len(decode))), list(range(len(decode)))
        places = [next_point(i, row, 0) for i, row in enumerate(decode)]
        end = len(decode)
        for i, prompt in enumerate(prompts, start=len(decode)):
            end += len(prompt.tokens)
            if prompt.sampling is not None:
                position = prompt.start + len(prompt.tokens)
                places.append(SamplingPoint(len(rows), prompt.slot, position, prompt.sampling))
                rows.append(i)
                where.append(end - 1)
        return cls(rows, where, places, len(decode))

    @property
    def begun(self) -> list[SamplingPoint]:
        """Of prompts: their slots are these requests' from now on."""
        return self.places[self.decoding :]


def next_point(i: int, row: DecodeRow, step: int) -> SamplingPoint:
    """Where a decode row samples in that step of a launch."""
    return SamplingPoint(i, row.slot, row.position + step + 1, row.sampling)
