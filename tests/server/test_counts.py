"""What an answer has cost, as the endpoints that count by themselves report it."""

from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.reasoning import ReasoningParser, ThinkingMarks
from twolane.frontend.text.output_reader import Delta
from twolane.server.service.counts import AnswerCounts


def test_thinking_is_counted_up_to_the_answer_and_no_further() -> None:
    counts, reader = (
        AnswerCounts(prompt=9),
        AnswerReader(ReasoningParser(ThinkingMarks(opened=True))),
    )
    deltas = [
        Delta(0, "Let me", [1, 2], [0, 3], cached=8),
        Delta(0, " see.", [3], [6]),
        Delta(0, "</think>", [4], [11]),
        Delta(0, "\n\nParis", [5, 6], [19, 21]),
        Delta(0, " it is", [7, 8, 9], [26, 27, 29], finish="stop", stop_reason=9),
    ]
    for delta in deltas:
        counts.read(delta, reader)
    assert (counts.prompt, counts.cached, counts.output) == (9, 8, 9)
    assert counts.thinking == 4
    assert (counts.finish, counts.stop) == ("stop", 9)
