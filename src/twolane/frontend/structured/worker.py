"""Compiles and tries grammars in a sandbox; `maker` starts it.

A client's grammar may be made to take much time, memory or stack. What is tried here is all that
the engine does with it until the first token, so that a grammar that breaks something breaks only
this process.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from heapq import nlargest

import msgspec
from llguidance import LLMatcher, LLTokenizer

from twolane.common.errors import FieldError
from twolane.engine.constrained.matching import (
    AMBIGUOUS,
    Matching,
    matcher_of,
    matching_takes_too_long,
    problem_of,
)
from twolane.frontend import sandboxed
from twolane.frontend.structured import grammar as grammars
from twolane.frontend.structured import jobs
from twolane.frontend.structured.tools import (
    ANSWERS,
    BARE,
    bare_calls_grammar,
    calls_grammar,
    strict_grammar,
)

TRIED_STEPS, TRIED_TOKENS = 3, 1024
"""Number of consecutive tokens that a grammar is tried with, and the number of longest tokens that
they are chosen from."""
STACK = 2 << 20
"""Stack in bytes for compiling grammars: a quarter of that of the engine's threads."""


def set_up(data: bytes) -> tuple[bytes, sandboxed.Handler]:
    """Read the vocabulary."""
    setup = msgspec.msgpack.decode(data, type=jobs.GrammarSetup)
    try:
        vocabulary = setup.vocabulary.matching(setup.eos_token_ids)
    except ValueError as error:  # it does not go with the model
        problem = f"cannot be served: the model's tokenizer does not serve: {error}"
        wrong = msgspec.msgpack.encode(jobs.InvalidGrammar(problem))
        return b"", lambda _: wrong
    longest = longest_tokens(vocabulary.tokenizer)
    token_of = setup.added_tokens.get
    threading.stack_size(STACK)

    def handle(job: bytes) -> bytes:
        request = msgspec.msgpack.decode(job, type=jobs.GrammarJob)
        results: list[jobs.Result] = []
        thread = threading.Thread(
            target=lambda: results.append(result(request, token_of, vocabulary, longest))
        )
        thread.start()
        thread.join()
        return msgspec.msgpack.encode(results[0])

    return b"", handle


def longest_tokens(vocabulary: LLTokenizer) -> Sequence[int]:
    """Return the tokens with the longest texts, the longest first."""
    ordinary = [i for i in range(vocabulary.vocab_size) if not vocabulary.is_special_token(i)]
    return nlargest(TRIED_TOKENS, ordinary, key=lambda token: len(vocabulary.decode_bytes([token])))


def result(
    job: jobs.GrammarJob, token_of: grammars.TokenOf, vocabulary: Matching, longest: Sequence[int]
) -> jobs.Result:
    """Return the grammar, or why it cannot be served."""
    try:
        grammar = grammars.made_grammar(maker(job, token_of), job.field)
        try_out(grammar, job.field, vocabulary, longest)
    except FieldError as error:
        return jobs.InvalidGrammar(error.problem, error.field)
    return jobs.MadeGrammar(grammar)


def maker(job: jobs.GrammarJob, token_of: grammars.TokenOf) -> grammars.Maker:
    """Return the maker of a job's grammar."""
    make = answer_maker(job.answer, token_of, closes=job.closes)
    if (calls := job.calls) is not None:
        make = partial(with_calls, calls, make, token_of, closes=job.closes)
    if (thinking := job.thinking) is None:
        return make
    return lambda: grammars.after_thinking(make(), token_of, thinking)


def with_calls(
    calls: jobs.Calls, answer: grammars.Maker, token_of: grammars.TokenOf, *, closes: bool
) -> str:
    """Return the grammar of an answer or of calls in its place; `closes`: see the job.

    Raises:
        FieldError: the tools have schemas that cannot be served.
    """
    make = answer_maker(calls, token_of, closes=closes)
    if calls.format in BARE:
        tools, several = calls.tools, calls.several
        make = partial(bare_calls_grammar, tools, token_of, several=several, closes=closes)
    made = grammars.made_grammar(make, "tools")
    before = grammars.terminal(ANSWERS[calls.format], token_of) if calls.format in ANSWERS else ""
    return grammars.either(answer(), made, before)


def answer_maker(
    answer: jobs.OutputConstraint | jobs.Calls, token_of: grammars.TokenOf, *, closes: bool
) -> grammars.Maker:
    """Return the maker of the grammar of an answer without thinking; `closes`: see the job."""
    if isinstance(answer, jobs.Schema | jobs.SchemaText) and answer.closes is not None:
        closes = answer.closes
    match answer:
        case jobs.Schema(schema):
            return lambda: grammars.json_schema_grammar(schema, closes=closes)
        case jobs.SchemaText(text):
            return lambda: grammars.json_schema_grammar(msgspec.json.decode(text), closes=closes)
        case jobs.Regex(regex):
            return lambda: grammars.regex_grammar(regex)
        case jobs.Choices(choices):
            return lambda: grammars.choice_grammar(choices)
        case jobs.ContextFree(text):
            return lambda: grammars.context_free_grammar(text, token_of)
        case jobs.Calls(call_format, tools, several, free):
            write: Callable[..., str] = strict_grammar if free else calls_grammar
            return lambda: write(call_format, tools, token_of, several=several, closes=closes)


def try_out(grammar: str, field: str, vocabulary: Matching, longest: Sequence[int]) -> None:
    """Check that a grammar can be matched and its masks computed for some tokens.

    Args:
        grammar: a grammar in the form that the engine compiles.
        field: the request's, which asks for it.
        vocabulary: the model's.
        longest: tokens of which those that the grammar allows are tried, the first one first.

    Raises:
        FieldError: it cannot.
    """
    matcher = matcher_of(vocabulary, grammar)
    seconds, problem = 0.0, problem_of(matcher)
    for taken in range(1 + TRIED_STEPS):
        if problem is not None or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        if (problem := problem_of(matcher)) is None:
            seconds += seconds_to_take(matcher, mask, longest)
            problem = AMBIGUOUS if matching_takes_too_long(seconds, taken) else problem_of(matcher)
    if problem is not None:
        raise FieldError(field, f"cannot be served: {problem}")


def seconds_to_take(matcher: LLMatcher, mask: bytes, longest: Sequence[int]) -> float:
    """Feed a matcher the first allowed one of these tokens, if any; return the CPU seconds."""
    allowed = next((token for token in longest if mask[token // 8] >> token % 8 & 1), None)
    began = time.thread_time()
    if allowed is not None:
        matcher.consume_token(allowed)
    return time.thread_time() - began


if __name__ == "__main__":
    sandboxed.run(set_up)
