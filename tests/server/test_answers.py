"""What a chat answer shows, where no server is needed to see it."""

import json

import pytest

from twolane.engine.messages import TokenLogprobs
from twolane.frontend.parsers.answer import AnswerReader
from twolane.frontend.parsers.reasoning import ReasoningParser, ThinkingMarks
from twolane.frontend.text.codec import TextCodec
from twolane.frontend.text.output_reader import Delta
from twolane.server.openai.answers import Answer, AnswerOptions
from twolane.server.openai.logprobs import LogprobWriter, TokenPlace


def thinking():
    return AnswerReader(ReasoningParser(ThinkingMarks(opened=True)))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_has_the_name_that_the_server_is_told(name):
    options = AnswerOptions(parsed=thinking, reasoning_field=name)
    writer = LogprobWriter(TextCodec(None), 0, as_ids=False)
    delta = Delta(0, "Well.</think>So", [7, 8], [0, 5], finish="stop")
    answer = Answer("chat", "m", [[1]], writer, options)
    answer.add(delta)
    message = answer.whole()["choices"][0]["message"]
    assert (message.pop(name), message["content"]) == ("Well.", "So")
    assert not message.keys() & {"reasoning", "reasoning_content"}
    chunks = Answer("chat", "m", [[1]], writer, options).chunks(delta)
    assert chunks[-1]["choices"][0]["delta"] == {name: "Well.", "content": "So"}


def test_of_alternatives_with_one_name_the_likeliest_is_shown():
    """A special token and text may be spelt alike."""

    class Codec(TextCodec):
        has_tokenizer = True

        def token_bytes(self, token):
            return b"a" if token < 9 else b"b"

    entry = TokenLogprobs(8, -3.0, 3, ((7, -0.5), (9, -1.0)))
    shown = LogprobWriter(Codec(None), 2, as_ids=False).completion([TokenPlace(8, 0, entry)])
    assert json.loads(bytes(shown["top_logprobs"])) == [{"a": -0.5, "b": -1.0}]
    assert json.loads(bytes(shown["token_logprobs"])) == [-3.0]
