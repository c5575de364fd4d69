"""Programs that come with a model are bounded."""

import time

import pytest

from twolane.frontend.text import codec as codecs
from twolane.frontend.text.codec import TextCodec, TextError
from twolane.frontend.text.fence import TookTooLong, within
from twolane.frontend.text.tokenizer import ModelTokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def loop_for_ever():
    while True:
        pass


def test_what_does_not_end_is_broken_off():
    began = time.monotonic()
    with pytest.raises(TookTooLong):
        within(0.1, loop_for_ever)
    assert time.monotonic() - began < 5


def test_what_ends_in_time_is_left_alone():
    for _ in range(50):
        assert within(0.5, lambda: "ended") == "ended"
    time.sleep(0.6)  # an alarm that came too late would go off here


@pytest.mark.parametrize(
    "bomb",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [0] * 10**10 }}",
        "{{ 9**(9**9) }}",
    ],
)
def test_a_template_that_takes_too_much_is_refused(bomb, tokenizer, monkeypatch):
    monkeypatch.setattr(codecs, "TEMPLATE_SECONDS", 0.5)
    source = bomb + "{{ messages[0].content }}"
    codec = TextCodec(ModelTokenizer(tokenizer.backend, source, {}))
    began = time.monotonic()
    with pytest.raises(TextError):
        codec.chat(HELLO)
    assert time.monotonic() - began < 5


def test_a_template_of_very_many_brackets_is_no_crash(tokenizer):
    source = "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"
    codec = TextCodec(ModelTokenizer(tokenizer.backend, source, {}))
    with pytest.raises(TextError):
        codec.chat(HELLO)
