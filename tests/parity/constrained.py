"""Requests of which some have a grammar, and what `transformers` says where it allows something."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from tests.engine.test_constraints import EOS, GRAMMARS, vocabulary
from tests.engine.test_slow_grammars import SLOW
from tests.parity.judge import Judge, Tally
from tests.parity.serving import Served
from tests.parity.test_tiny import REQUESTS
from twolane.engine.constrained.matching import matcher_of
from twolane.engine.messages import Submit
from twolane.frontend.structured.grammar import regex_grammar

LONG = regex_grammar("([a-z]{2,4}-){30}x")
"""No answer ends within the tokens that are asked for."""
GIVEN = (None, GRAMMARS[0], LONG, None, SLOW, GRAMMARS[1])


def constrained(requests: Sequence[Submit] = tuple(REQUESTS)) -> list[Submit]:
    """The requests of parity tests, a third of them without a grammar."""
    made = []
    for i, submit in enumerate(requests):
        grammar = GIVEN[i % len(GIVEN)]
        params = replace(submit.params, grammar=grammar, ignore_eos=grammar is None)
        made.append(replace(submit, params=params))
    return made


def limited(model: Callable[..., Any], grammar: str) -> Callable[..., Any]:
    """A reference whose logits of an output are those of tokens that the grammar allows."""
    fresh = matcher_of(vocabulary().matching([EOS]), grammar)

    def call(whole: torch.Tensor, logits_to_keep: int) -> Any:
        said = model(whole, logits_to_keep=logits_to_keep)
        matcher, tokens = fresh.deep_copy(), whole[0, -(logits_to_keep - 1) :].tolist()
        for place in range(logits_to_keep):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").astype(bool)
            row = said.logits[0, place]
            row[len(allowed) :] = -torch.inf
            row[: len(allowed)][torch.from_numpy(~allowed[: len(row)])] = -torch.inf
            if place < logits_to_keep - 1:
                assert matcher.consume_token(tokens[place])
        return said

    return call


def judges_of(judge: Judge) -> Callable[[str | None], Judge]:
    """The judge of answers that follow a grammar, made once for each."""

    @cache
    def made(grammar: str | None) -> Judge:
        return judge if grammar is None else Judge(limited(judge.model, grammar))

    return made


def compare(
    submits: Sequence[Submit],
    served: Served,
    judge_of: Callable[[str | None], Judge],
    tally: Tally,
) -> None:
    """Every token is the reference's best of those that its grammar allows."""
    for submit, output, finish in zip(submits, served.outputs, served.finish, strict=True):
        ended = output[-1] == EOS and submit.params.grammar is not None
        assert finish == ("stop" if ended else "length")
        assert ended or len(output) == submit.params.max_tokens
        tally.forgiven += judge_of(submit.params.grammar).forgiven(submit.prompt, output)
        tally.tokens += len(output)
    tally.runs += 1
    tally.side_by_side += served.side_by_side
