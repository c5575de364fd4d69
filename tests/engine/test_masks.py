"""Masks of a batch are those of each matcher alone; one that has failed fails its request alone."""

import threading

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.server.serving import PATIENCE
from twolane.engine.constrained import constraints
from twolane.engine.constrained.constraints import Constraint, GrammarError, Grammars, Masks
from twolane.engine.constrained.matching import matcher_of
from twolane.frontend.structured.grammar import (
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    regex_grammar,
)

from .test_constraints import EOS, GRAMMARS, tokenizer, vocabulary

STOP = 17


def said(vocab_size: int, text: str) -> list[Constraint]:
    """Requests that have said this much of an answer, by a grammar each, and what is no answer."""
    grammars = Grammars(vocabulary(), vocab_size, (EOS,), lambda: None, groups=2)
    asked = [regex_grammar("[0-9]+"), GRAMMARS[1], regex_grammar("[0-9]+"), GRAMMARS[1]]
    made = [grammars.constraint(each, {EOS, STOP}).result()[0] for each in asked]
    for token in tokenizer().encode(text).ids:
        for constraint in made[:3]:
            constraint.take(token)
    made[3].take(tokenizer().token_to_id("-"))
    return made


@pytest.mark.parametrize("vocab_size", [60, 99, 300])
def test_masks_of_a_batch_are_those_of_each_alone(vocab_size: int) -> None:
    """Also where the model has fewer tokens than the tokenizer, or more."""
    told = threading.Event()
    *masks, failed = Masks(told.set, 2).start(said(vocab_size, "123")).result()
    assert told.wait(PATIENCE)
    assert isinstance(failed, GrammarError)
    assert "-" in str(failed)
    texts = vocabulary().matching([EOS])
    for grammar, mask in zip((regex_grammar("[0-9]+"), GRAMMARS[1]), masks, strict=False):
        alone = matcher_of(texts, grammar)
        assert alone.consume_tokens(tokenizer().encode("123").ids)
        bits = np.unpackbits(np.frombuffer(alone.compute_bitmask(), np.uint8), bitorder="little")
        wanted = {*np.flatnonzero(bits[:vocab_size]).tolist()}
        wanted |= {STOP} if EOS in wanted else set()
        assert isinstance(mask, bytes) and len(mask) == -(-vocab_size // 8)
        got = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        assert {*np.flatnonzero(got).tolist()} == wanted
    assert masks[0] == masks[2]
    assert masks[0] != masks[1]


def test_a_mask_that_is_computed_by_itself_is_the_same() -> None:
    masks = Masks(lambda: None, 2)
    together = masks.start(said(99, "123")[:3]).result()
    apart = [masks.start_apart(each).result()[0] for each in said(99, "123")[:3]]
    assert apart == together


def grammars() -> Grammars:
    return Grammars(vocabulary(), 99, (EOS,), lambda: None, groups=2)


def test_a_grammar_that_takes_long_to_compile_is_slow_in_all_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraints, "SLOW_COMPILE_SECONDS", 1e-9)
    names = [{"properties": {f"a{i}": {"const": i}}} for i in range(1000)]
    large = json_schema_grammar({"properties": {"k": {"anyOf": names}}, "required": ["k"]})
    made = grammars()
    paces = [made.constraint(large, {EOS}).result()[0].pace for _ in range(3)]
    assert paces[0] is paces[1] is paces[2]
    assert paces[0].apart
    small = made.constraint(choice_grammar(["a", "b"]), {EOS}).result()[0].pace
    assert small is not paces[0]


def test_grammars_of_a_call_that_took_long_are_tried_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "SLOW_COMPILE_SECONDS", 1e9)
    monkeypatch.setattr(constraints, "SUSPECT_SECONDS", 0.0)
    made = grammars()
    monkeypatch.setattr(constraints, "SLOW_MASK_SECONDS", 1e9)
    one = made.constraint(choice_grammar(["aa", "bb"]), {EOS}).result()[0]
    assert not one.pace.apart
    masks = Masks(lambda: None, 2)
    masks.start([one]).result()
    assert one.pace.apart, "the call may have waited for it"
    masks.start_apart(one).result()
    assert not one.pace.apart, "it did not"


def test_a_grammar_that_takes_longer_with_each_token_is_given_up() -> None:
    """Its last token is taken with the lock of the interpreter held, for tenths of a second."""
    words = Tokenizer.from_str(tokenizer().to_str())
    words.add_tokens([AddedToken("a" * 200, normalized=False)])
    made = Grammars(vocabulary(words), 150, (EOS,), lambda: None, groups=1)
    constraint = made.constraint(context_free_grammar("start: s\ns: s s | /./"), {EOS}).result()[0]
    for _ in range(3):
        constraint.take(words.token_to_id("a" * 200))
    [mask] = Masks(lambda: None, 1).start([constraint]).result()
    assert isinstance(mask, GrammarError)
    assert "ambiguous" in str(mask)
