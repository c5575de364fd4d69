"""Where an answer is written: long ones in a thread, so that streams go on meanwhile."""

import asyncio
import threading

import pytest
from starlette.requests import Request

from twolane.frontend.text.output_reader import Delta
from twolane.sampling import TokenLogprobs
from twolane.server.http.disconnect import unless_gone
from twolane.server.service.respond import MAX_SCORED, respond

SCORE = TokenLogprobs(7, -0.5, 1, [(7, -0.5)])


class Given:
    """A generation that is there."""

    def __init__(self, deltas):
        self._deltas = deltas

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    async def __aiter__(self):
        for delta in self._deltas:
            yield delta


class Told:
    """An answer that tells which thread wrote it."""

    def __init__(self):
        self.tokens = 0

    def add(self, delta):
        self.tokens += len(delta.tokens)

    def whole(self):
        return {
            "tokens": self.tokens,
            "loop": threading.current_thread() is threading.main_thread(),
        }


@pytest.mark.parametrize("where", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("more", [0, 1])
def test_long_answers_with_log_probabilities_leave_the_event_loop(where, more):
    """Written there, 268,800 entries held other streams up for a third of a second."""
    scores = [SCORE] * (MAX_SCORED // 2)
    deltas = [Delta(0, "a", [7], [0], **{where: [*scores, *[SCORE] * more]}) for _ in range(2)]

    async def stay():
        await asyncio.Event().wait()

    async def written():
        request = Request({"type": "http"}, stay)
        return await respond(request, Given(deltas), Told(), streams=False)

    answer = asyncio.run(written())
    assert answer.body == b'{"tokens":2,"loop":%s}' % (b"false" if more else b"true")


def test_who_is_cancelled_when_the_work_is_done_is_cancelled_all_the_same():
    """Else the lines of a batch go on behind Ctrl-C, and write to a file that is closed."""

    async def run():
        async def receive():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # as the client is not watched any more
                caller.cancel()
                raise

        async def done():
            return 7

        caller = asyncio.create_task(unless_gone(Request({"type": "http"}, receive), done()))
        with pytest.raises(asyncio.CancelledError):
            await caller

    asyncio.run(run())
