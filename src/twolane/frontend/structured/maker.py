"""Compiles and tries grammars in a sandbox with bounded time and memory."""

import msgspec

from twolane.common.errors import FieldError
from twolane.frontend.sandbox import LONG_WORK_NICENESS, Limits, Sandbox, SandboxError
from twolane.frontend.structured.jobs import GrammarJob, GrammarSetup, MadeGrammar, Result

MODULE = "twolane.frontend.structured.worker"
LONG_JOB = 1 << 14
"""Bytes from which a job runs in the queue of long jobs, which shorter ones do not wait for."""
SHORT_WORK_NICENESS = 5
"""Niceness (nice(2)) that the worker of short jobs adds to its own: it yields to processes that
decode."""
LIMITS = Limits(seconds=10.0, memory=1 << 30)


class GrammarMaker:
    """Compiles grammars for a model. Its sandbox starts with the first one.

    All methods belong to one event loop.

    Args:
        model: the model's tokens.
    """

    def __init__(self, model: GrammarSetup) -> None:
        setup = msgspec.msgpack.encode(model)
        self._sandbox = Sandbox(MODULE, setup, LIMITS, "grammars wait to be made")
        self._queues = (
            self._sandbox.queue(SHORT_WORK_NICENESS),
            self._sandbox.queue(LONG_WORK_NICENESS),
        )

    @property
    def problem(self) -> str | None:
        """See `Sandbox.problem`."""
        return self._sandbox.problem

    async def make(self, job: GrammarJob, client: str = "") -> str:
        """Return a grammar that the engine can match.

        Args:
            job: the constraint and its field.
            client: who asks; clients are served in rotation.

        Raises:
            FieldError: it is wrong, has parts that are not implemented, or takes too much.
            QueueFull: too many grammars wait.
        """
        try:
            data = msgspec.msgpack.encode(job)
        except (OverflowError, ValueError) as error:
            why = "a number of it is beyond 64 bits" if isinstance(error, OverflowError) else error
            raise FieldError(job.field, f"cannot be served: {why}") from error
        try:
            reply = await self._queues[len(data) >= LONG_JOB].run([data], client)
        except SandboxError as error:
            raise FieldError(job.field, f"cannot be served: {error}") from error
        result = msgspec.msgpack.decode(reply, type=Result)
        if isinstance(result, MadeGrammar):
            return result.grammar
        raise FieldError(result.field or job.field, result.problem)

    async def close(self) -> None:
        """Stop the sandbox."""
        await self._sandbox.close()
