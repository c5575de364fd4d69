"""Whatever ends by itself under a schema's grammar validates, by an independent validator."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from twolane.common.errors import FieldError
from twolane.engine.constrained.matching import matcher_of
from twolane.frontend.structured.grammar import json_schema_grammar, made_grammar
from twolane.frontend.text.codec import TextCodec

from .random_schemas import random_schema, rooted

PARTS, SCHEMAS, ANSWERS, TOKENS = 10, 100, 10, 64
"""In the long form 10 parts of 100 schemas are answered 10 times each by the embedded model."""
AT_ONCE = 12
"""Requests that the long form sends side by side."""
SECONDS = 600
"""Seconds that the long form waits for the answers to a schema: much may run beside it."""


def schemas(part, count):
    chance = random.Random(part)
    return [rooted(random_schema(chance)) for _ in range(count)]


def grammar_of(schema):
    return made_grammar(lambda: json_schema_grammar(schema), "response_format")


def valid(schema, text):
    checked = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return checked.is_valid(json.loads(text))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return TextCodec(tokenizer).vocabulary().matching([2])


def walk(vocabulary, grammar, closing, chance):
    """Choose tokens at random; return them if the walk ends by itself."""
    matcher = matcher_of(vocabulary, grammar)
    chosen = []
    for _ in range(80):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert len(allowed), matcher.get_error()
        # Most strings go on for ever: what closes them is often taken where it may be.
        ends = np.intersect1d(allowed, closing)
        token = int(chance.choice(ends if len(ends) and chance.random() < 0.6 else allowed))
        if token == 2:
            return chosen
        matcher.consume_token(token)
        chosen.append(token)
    return None


def test_random_walks_end_in_valid_answers(tokenizer, vocabulary):
    closing = [2, *[tokenizer.backend.token_to_id(text) for text in ('"', "}", "]", "}}")]]
    chance, ended, refused = random.Random(1), 0, 0
    for schema in schemas(0, 40):
        try:
            grammar = grammar_of(schema)
        except FieldError as error:
            refused += 1
            assert error.field == "response_format"
            continue
        walked = walk(vocabulary, grammar, closing, chance)
        if walked is not None:
            ended += 1
            text = tokenizer.backend.decode(walked, skip_special_tokens=False)
            assert valid(schema, text), (schema, text)
    assert ended >= 20
    assert refused <= 10


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_models_answers_are_valid(real_client, part):
    answered = ended = refused = 0
    asked = schemas(part, SCHEMAS)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(partial(ask, real_client), asked, range(SCHEMAS)))
    for schema, choices in zip(asked, answers, strict=True):
        refused += not choices
        answered += len(choices)
        for choice in choices:
            if choice["finish_reason"] == "stop":
                ended += 1
                assert valid(schema, choice["message"]["content"]), (schema, choice)
    print(f"part {part}: {answered} answers, {ended} ended, {refused} schemas refused")
    assert ended > answered // 4
    assert refused < SCHEMAS // 4


@pytest.fixture(scope="module")
def real_client():
    from ..server.conftest import MODEL
    from ..server.serving import serving

    with serving(MODEL, "--kv-tokens", "20000") as served:
        yield served


def ask(served, schema, place):
    """The answers to a schema; none if it is refused by name."""
    form = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
    message = {"role": "user", "content": "Give an example, short."}  # one prompt is computed once
    body = {"messages": [message], "response_format": form, "n": ANSWERS, "max_tokens": TOKENS}
    status, _, answer = served.request(
        "/v1/chat/completions", {**body, "temperature": 1.0, "seed": place}, seconds=SECONDS
    )
    if status == 400:
        assert "response_format" in answer["error"]["message"]
        return []
    assert status == 200, answer
    return answer["choices"]
