"""A system outside of the package: chunked prefill whose prompts go by their deadline.

Each forward pass has a token for every request that decodes, then prompt tokens up to a budget, as
under `chunked`. The budget goes to the prompts whose first token is due soonest. From this folder's
parent:

    twolane serve MODEL --system examples.earliest_deadline.EarliestDeadline

docs/contributing/system.md explains it line by line.
"""

import msgspec

from twolane.systems.base import System
from twolane.systems.common.admission import next_chunks
from twolane.systems.common.multiplex import deadline
from twolane.systems.common.settings import at_least
from twolane.systems.plan import DecodeSteps, Hybrid, Launch, Plan
from twolane.systems.view import RequestView, View

LEAD = 0.005
"""Seconds before the device would run dry at which the next pass is queued."""


class EarliestDeadline(System, msgspec.Struct, frozen=True):
    """Chunked prefill in the order in which first tokens are due."""

    token_budget: int = 256
    """Number of tokens in a forward pass, decode and prefill together."""

    def __post_init__(self) -> None:
        at_least(self, token_budget=1)

    def plan(self, view: View, memory: None) -> tuple[Plan, None]:
        """Return a pass of decode tokens and of the most urgent prompt tokens."""
        device = view.lanes["device"]
        if not device.due(view.now, LEAD):
            return Plan(wake_at=device.due_at(LEAD)), None
        rows = view.rows("device")
        budget = max(1, self.token_budget - len(rows))
        chunks = next_chunks(view, budget, split=True, waiting=sorted(view.waiting, key=urgency))
        if not chunks and not rows:
            return Plan(), None
        work = Hybrid() if chunks else DecodeSteps()
        launch = Launch("device", view.units, work)
        reason = f"{len(rows)} decode + {sum(chunk.n for chunk in chunks)} prompt tokens"
        return Plan(admit=chunks, launches=(launch,), reason=reason), None


def urgency(request: RequestView) -> tuple[int, float]:
    """Return a request's place in the queue: by its priority, then by its deadline in seconds."""
    return request.priority, deadline(request, request.new)
