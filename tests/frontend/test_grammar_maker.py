"""Grammars are made in a process of their own, which those that break something end alone."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from twolane.common.errors import FieldError
from twolane.frontend.parsers.reasoning import ThinkingMarks
from twolane.frontend.sandbox import Limits
from twolane.frontend.structured import maker
from twolane.frontend.structured.jobs import (
    Calls,
    Choices,
    ContextFree,
    GrammarJob,
    GrammarSetup,
    Regex,
    Schema,
    SchemaText,
)
from twolane.frontend.structured.tools import Tool
from twolane.frontend.text.codec import TextCodec

from .test_structured import chain

PATIENT = Limits(seconds=300.0, memory=maker.LIMITS.memory)
"""A busy machine takes many times as long as a grammar's own second or two."""
INTEGER = GrammarJob("response_format", Schema({"type": "integer"}))


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(maker, "LIMITS", PATIENT)


@asynccontextmanager
async def making(tokenizer, eos=2):
    codec = TextCodec(tokenizer)
    made = maker.GrammarMaker(GrammarSetup(codec.vocabulary(), codec.added_tokens, [eos]))
    try:
        yield made
    finally:
        await made.close()


async def problem(made, answer):
    with pytest.raises(FieldError) as refused:
        await made.make(GrammarJob("structured_outputs", answer))
    assert refused.value.field == "structured_outputs"
    return refused.value.problem


def test_grammars_of_all_kinds_are_made(tokenizer):
    calls = Calls("hermes", [Tool("f", {"type": "object"}, strict=True)], several=True, free=True)
    answers = (Regex("a+"), Choices(["a", "b"]), SchemaText('{"type": "null"}'), calls)

    async def run():
        async with making(tokenizer) as made:
            how = ThinkingMarks(opened=True)
            jobs = [INTEGER, *[GrammarJob("x", answer, how) for answer in answers]]
            return await asyncio.gather(*map(made.make, jobs))

    plain, *thinking = asyncio.run(run())
    assert len(json.loads(plain)["grammars"]) == 1
    assert all("thoughts" in grammar for grammar in thinking)


def test_what_cannot_be_served_is_refused_with_its_reason(tokenizer):
    branches = [{"patternProperties": {f"^a{i}_": {"const": i}}} for i in range(2_000)]

    async def run():
        async with making(tokenizer) as made:
            assert "contains" in await problem(made, Schema({"type": "array", "contains": {}}))
            assert "beyond 64 bits" in await problem(made, Schema({"maximum": 2**70}))
            assert "nested too deeply" in await problem(made, SchemaText("[" * 99_999))
            for nothing in (Schema({"$ref": "#"}), ContextFree('start: "" start')):
                said = await problem(made, nothing)
                assert said == "cannot be served: no text that the model can write fits it"
            assert "truncated" in await problem(made, SchemaText('{"type": '))
            # It compiles; what its first token may be is too much to find out.
            assert "Too many" in await problem(made, Schema({"anyOf": branches}))
        async with making(tokenizer, eos=10**6) as other:
            for _ in range(2):
                assert "tokenizer" in await problem(other, Regex("a"))

    asyncio.run(run())


def test_a_grammar_that_ends_its_process_ends_nothing_else(tokenizer, monkeypatch):
    monkeypatch.setattr(maker, "MODULE", "tests.frontend.unbounded_grammars")

    async def run():
        async with making(tokenizer) as made:
            assert "memory or crashed" in await problem(made, Schema(chain(3_000)))
            return await made.make(INTEGER)

    assert "integer" in asyncio.run(run())


def test_long_grammars_hold_up_no_short_one(tokenizer):
    """However many wait: they have a process of their own."""
    long = Schema({"enum": [f"v{i}" for i in range(40_000)]})

    async def run():
        async with making(tokenizer) as made:
            waiting = [asyncio.create_task(made.make(GrammarJob("x", long))) for _ in range(20)]
            await waiting[0]
            await made.make(INTEGER)
            ended = sum(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            return ended

    assert asyncio.run(run()) < 20
