"""Makes grammars and tries them, behind a fence. A program of its own: see `maker`.

A client's grammar may be made to take much time, memory or stack. What is tried here is all that
the engine does with it until the first token, so that a grammar that breaks something breaks only
this process.
"""

import threading
from collections.abc import Callable

import msgspec
from llguidance import LLMatcher, LLTokenizer

from twolane.common.errors import FieldError
from twolane.common.grammars import parser_limits, problem_of
from twolane.frontend import fenced
from twolane.frontend.structured import grammar as grammars
from twolane.frontend.structured.jobs import (
    Calls,
    Choices,
    ContextFree,
    GrammarJob,
    GrammarSetup,
    Made,
    Regex,
    Result,
    Schema,
    SchemaText,
    Wanted,
    WrongGrammar,
)
from twolane.frontend.structured.tools import calls_grammar, strict_grammar

STACK = 2 << 20
"""Grammars are made with a stack of this many bytes: a quarter of that of the engine's threads."""


def set_up(given: bytes) -> tuple[bytes, fenced.Handler]:
    """Read the vocabulary."""
    setup = msgspec.msgpack.decode(given, type=GrammarSetup)
    try:
        vocabulary = LLTokenizer(setup.tokenizer, eos_token=list(setup.eos_token_ids))
    except ValueError as error:  # it does not go with the model
        problem = f"cannot be served: the model's tokenizer does not serve: {error}"
        wrong = msgspec.msgpack.encode(WrongGrammar(problem))
        return b"", lambda _: wrong
    added = msgspec.json.decode(setup.tokenizer).get("added_tokens", ())
    token_of = {token["content"]: token["id"] for token in added}.get
    threading.stack_size(STACK)

    def handle(job: bytes) -> bytes:
        asked = msgspec.msgpack.decode(job, type=GrammarJob)
        results: list[Result] = []
        thread = threading.Thread(
            target=lambda: results.append(result(asked, token_of, vocabulary))
        )
        thread.start()
        thread.join()
        return msgspec.msgpack.encode(results[0])

    return b"", handle


def result(asked: GrammarJob, token_of: grammars.TokenOf, vocabulary: LLTokenizer) -> Result:
    """Return the grammar, or why it cannot be served."""
    try:
        made = grammars.made_grammar(maker(asked, token_of), asked.field)
        try_out(made, asked.field, vocabulary)
    except FieldError as error:
        return WrongGrammar(error.problem)
    return Made(made)


def maker(asked: GrammarJob, token_of: grammars.TokenOf) -> grammars.Maker:
    """Return what makes the grammar."""
    make = answer_maker(asked.answer, token_of)
    if not asked.thinks:
        return make
    return lambda: grammars.behind_thinking(make(), token_of, opened=asked.opened)


def answer_maker(answer: Wanted | Calls, token_of: grammars.TokenOf) -> grammars.Maker:
    """Return what makes the grammar of an answer without thinking."""
    match answer:
        case Schema(schema):
            return lambda: grammars.json_schema_grammar(schema)
        case SchemaText(text):
            return lambda: grammars.json_schema_grammar(msgspec.json.decode(text))
        case Regex(regex):
            return lambda: grammars.regex_grammar(regex)
        case Choices(choices):
            return lambda: grammars.choice_grammar(choices)
        case ContextFree(text):
            return lambda: grammars.context_free_grammar(text)
        case Calls(form, tools, several, free):
            write: Callable[..., str] = strict_grammar if free else calls_grammar
            return lambda: write(form, tools, token_of, several=several)


def try_out(grammar: str, field: str, vocabulary: LLTokenizer) -> None:
    """See that a grammar can be matched, up to the mask of the first token.

    Raises:
        FieldError: it cannot.
    """
    matcher = LLMatcher(vocabulary, grammar, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if (problem := problem_of(matcher)) is not None:
        raise FieldError(field, f"cannot be served: {problem}")


if __name__ == "__main__":
    fenced.run(set_up)
