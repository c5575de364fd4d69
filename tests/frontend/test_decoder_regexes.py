"""Decoders whose regular expressions could hold the event loop up are refused by name."""

import time

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from twolane.frontend.text.decoder_regexes import check_decoder, is_quick

QUICK = [
    "^ ",
    "\u2581",
    " +",
    " {2,}$",
    "[ \u00a0]+?",
    r"\s+",
    r"\p{Lu}",
    "(a|b)c",
    r"\(a\)*",
    "[]a]*",
]
SLOW = [
    *("(a+)+$", "(a|aa)*$", "a*a*a*b", "(?=a)b", r"(a)\1", "(?:a|b)+c", "a**", "a{2}{3}{4}"),
    *("(a?){30}", "[a[bc]]*", "(a|b|c|d)x", "a" * 300, r"(?<x>a)\k<x>"),
]


@pytest.mark.parametrize("expression", QUICK)
def test_what_spaces_and_marks_of_words_need_is_taken(expression):
    assert is_quick(expression)
    check_decoder(decoders.Sequence([decoders.Replace(Regex(expression), " "), decoders.Fuse()]))


@pytest.mark.parametrize("expression", SLOW)
def test_what_may_backtrack_for_long_is_refused_by_name(expression):
    assert not is_quick(expression)
    slow = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(expression), " ")])
    with pytest.raises(ValueError, match="decoder: the regular expression"):
        check_decoder(slow)


def test_a_decoder_of_plain_replacements_is_taken():
    check_decoder(None)
    check_decoder(decoders.Sequence([decoders.Replace("(a+)+$", " "), decoders.ByteFallback()]))


@pytest.mark.parametrize("expression", QUICK)
def test_what_is_taken_is_quick_on_texts_that_are_bad_for_others(expression):
    backend = Tokenizer(models.WordLevel({"a" * 60: 0, " " * 60: 1, "b": 2}, "b"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(expression), " ")])
    began = time.process_time()
    for tokens in ([0] * 16, [1] * 16, [0, 1] * 8 + [2]):
        backend.decode(tokens, skip_special_tokens=False)
    assert time.process_time() - began < 5  # an expression that is not takes a second a token
