"""Others go on while the mask of a slow grammar is computed, with a grammar that is slow."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from llguidance import LLMatcher

from tests.engine.test_constraints import EOS, GRAMMARS, ask, requests, vocabulary
from tests.engine.test_constraints import model as model
from twolane.engine.build import build
from twolane.engine.config import EngineConfig
from twolane.engine.constrained import constraints
from twolane.engine.constrained.matching import matcher_of
from twolane.engine.engine import Engine
from twolane.engine.loop import turn
from twolane.engine.messages import Outputs, Submit
from twolane.frontend.engine_client import EngineClient
from twolane.frontend.structured.grammar import json_schema_grammar
from twolane.sampling import SamplingParams

WAIT_SECONDS = 60.0
NAMES, KEYS = 300, "klmnop"
SCHEMA = {
    "type": "object",
    "properties": {
        key: {
            "anyOf": [
                {"properties": {f"{key}{i}": {"const": i}}, "additionalProperties": False}
                for i in range(NAMES)
            ]
        }
        for key in KEYS
    },
    "required": [*KEYS],
    "additionalProperties": False,
}
SLOW = json_schema_grammar(SCHEMA)
"""Compiling it takes more than a tenth of a second of processor time, and each mask where an object
may begin some milliseconds."""


@pytest.fixture(scope="module")
def matcher() -> LLMatcher:
    return matcher_of(vocabulary().matching([EOS]), SLOW)


def check(matcher: LLMatcher, tokens: list[int]) -> None:
    """The grammar allows each of these tokens, and an end where there is one."""
    fresh, ended = matcher.deep_copy(), tokens[-1] == EOS
    said = tokens[:-1] if ended else tokens
    assert fresh.try_consume_tokens(said) == len(said)
    assert fresh.is_accepting() or not ended


@dataclass
class Loop:
    """The loop of an engine in this thread."""

    engine: Engine
    woken: threading.Event
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def submit(self, name: str, grammar: str | None, output: int) -> None:
        params = SamplingParams(
            temperature=1.0, seed=3, max_tokens=output, grammar=grammar, ignore_eos=grammar is None
        )
        self.tokens[name] = []
        self.engine.take([Submit(name, [5, 6, 7], params)])

    def take(self, news: Outputs) -> None:
        assert not news.refused
        for output in news.outputs:
            self.tokens[output.id] += output.tokens
            self.ended |= {output.id} if output.finish is not None else set()

    def run_until(self, name: str, count: int) -> None:
        """Go on until a request has so many tokens, or has ended."""
        while True:
            idle = turn(self.engine, [], self.take)
            if name in self.ended or len(self.tokens[name]) >= count:
                return
            if idle is not None:
                assert self.woken.wait(WAIT_SECONDS)
                self.woken.clear()


@contextmanager
def loop_of(model: str, system: str) -> Iterator[Loop]:
    config = EngineConfig(
        model=model, dtype="float32", system=system, kv_tokens=400, max_running=4, cores=2
    )
    woken = threading.Event()
    built = build(config, woken.set, lambda stage, fraction: None)
    try:
        built.engine.take([vocabulary()])
        yield Loop(built.engine, woken)
    finally:
        built.close()


@pytest.mark.parametrize("system", ["chunked", "auto"])
def test_others_end_while_a_slow_mask_is_not_there(
    model: str, system: str, matcher: LLMatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a call with the mask of the quick one may take long, too.
    monkeypatch.setattr(constraints, "SUSPECT_SECONDS", 1e9)
    with loop_of(model, system) as loop:
        masks, goes_on = loop.engine._masks._masks, threading.Event()
        for _ in range(masks._count):
            masks._apart.submit(goes_on.wait)
        try:
            loop.submit("slow", SLOW, 60)
            loop.run_until("slow", 1)
            loop.submit("free", None, 40)
            loop.submit("quick", GRAMMARS[1], 30)
            loop.run_until("free", 41)
            loop.run_until("quick", 31)
            assert loop.ended == {"free", "quick"}
            assert len(loop.tokens["slow"]) == 1
        finally:
            goes_on.set()
        loop.run_until("slow", 61)
        check(matcher, loop.tokens["slow"])


@pytest.mark.full
def test_answers_follow_slow_grammars_when_they_are_computed_again(
    model: str, matcher: LLMatcher
) -> None:
    config = EngineConfig(
        model=model, dtype="float32", system="auto", kv_tokens=208, max_running=16, cores=2
    )

    async def serve() -> tuple[dict[str, tuple[list[int], object]], int]:
        client = await EngineClient.start(config)
        try:
            client.send_vocabulary(vocabulary())
            slow = [
                Submit(f"s{i}", [5 + i] * 30, SamplingParams(seed=i, max_tokens=60, grammar=SLOW))
                for i in range(5)
            ]
            return await ask(client, [*slow, *requests(9)]), client.stats.preemptions
        finally:
            await client.close()

    answers, preemptions = asyncio.run(serve())
    assert preemptions
    for i in range(5):
        tokens, how = answers[f"s{i}"]
        assert how in ("stop", "length")
        check(matcher, tokens)
