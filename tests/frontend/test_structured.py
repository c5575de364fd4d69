import json
import random
import re
import time
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twolane.common.errors import FieldError
from twolane.engine.constrained.matching import MAX_OPTIONAL, matcher_of, problem_of
from twolane.frontend.answer_formats import FormatOptions, ModelFormats
from twolane.frontend.parsers.reasoning import KNOWN_MARKS, ThinkingMarks
from twolane.frontend.parsers.tool_calls import FORMATS, ToolCallParser
from twolane.frontend.structured.grammar import (
    after_thinking,
    check_grammar,
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    made_grammar,
    regex_grammar,
)
from twolane.frontend.structured.jobs import Calls, GrammarJob, Schema
from twolane.frontend.structured.patterns import EQUAL
from twolane.frontend.structured.schema import plain_schema
from twolane.frontend.structured.tools import (
    ANSWERS,
    ASSISTANT,
    OPENINGS,
    Tool,
    calls_grammar,
    parameter_types,
    strict_grammar,
    with_open_arguments,
)
from twolane.frontend.structured.worker import maker
from twolane.frontend.text.codec import TextCodec

from .checkpoints import byte_level, codec, write
from .test_parsers import (
    DEEPSEEK,
    DEEPSEEK_31,
    GLM45,
    LLAMA,
    MINICPM5,
    MINIMAX,
    MISTRAL,
    PYTHONIC,
    read,
)

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOTHING = Tool("f", None)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return TextCodec(tokenizer).vocabulary().matching([2])


@pytest.fixture(scope="module")
def takes(tokenizer, vocabulary):
    """Whether a grammar takes a text as a whole."""

    def whether(grammar, text):
        matcher = matcher_of(vocabulary, check_grammar(grammar, "x"))
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whether


@pytest.mark.parametrize("written", EQUAL)
@given(
    pieces=st.lists(st.sampled_from(["a", "_", "+", "-", "'", ".", "..", "@", "b.Co", "1"]))
    | st.lists(
        st.sampled_from(
            ["P", "T", *(f"{n}{unit}" for n in ("1", "20") for unit in "YMDWHS"), "3,5S", "."]
        )
    )
)
def test_a_pattern_without_look_around_is_equal_to_the_one_it_stands_for(written, pieces):
    """The samples alone are whole durations and addresses."""
    samples = ["P1Y2DT3H4.5S", "PT5M", "P3W", "P", "PT", "P1YT", "a.b'c+d@x-y.co", ".a@b.co"]
    samples += ["a..b@c.de", "a.@b.co", "a'@b.co", "'a@b.co", "a@b.c", "a@b..co", "P1W2D"]
    for text in ["".join(pieces), "P" + "".join(pieces), "".join(pieces) + "@b.co", *samples]:
        assert bool(re.search(EQUAL[written], text)) == bool(re.search(written, text)), text


def test_addresses_as_zod_has_them_are_enforced(takes):
    [email, *_] = EQUAL
    schema = {"type": "string", "format": "email", "pattern": email}
    grammar = json_schema_grammar(schema)
    assert takes(grammar, '"a.b@c.de"')
    assert not takes(grammar, '"a..b@c.de"')


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        (json_schema_grammar({"type": "integer"}), "12", "1.5"),
        (json_schema_grammar({"enum": ["a", 1]}), '"a"', '"b"'),
        (json_schema_grammar(WEATHER.parameters), '{ "city":\n"Rome" }', "{}"),
        (regex_grammar("[0-9]{2}-x+"), "12-xxx", "12-"),
        (regex_grammar(r"\d[^\d]\\d[\d.-]"), r"1a\d-", "\u0661a\\d-"),
        (regex_grammar(r"[\d_]\d"), "_1", "\u0661\u0661"),
        (choice_grammar(["a b", 'quoted "c"', "ü"]), 'quoted "c"', "a"),
        (choice_grammar(["", "a"]), "a", "b"),
        (choice_grammar([f"option {i}" for i in range(3000)]), "option 2999", "option 3000"),
        (context_free_grammar('start: "a" start | "b"'), "aab", "aa"),
        (context_free_grammar('root ::= "a" root | "b"'), "aab", "aa"),
    ],
)
def test_a_grammar_takes_what_it_says(takes, grammar, yes, no):
    assert takes(grammar, yes)
    assert not takes(grammar, no)


INTEGER = {"type": "integer"}
NUMBERS = {"type": "object", "additionalProperties": INTEGER}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (True, "[1]", "x"),
        ({**NUMBERS, "propertyNames": {"type": "string", "title": "x"}}, '{"b":1}', '{"b":"1"}'),
        ({**NUMBERS, "propertyNames": {"enum": ["a", "b"]}}, '{"b":1}', '{"c":1}'),
        ({**NUMBERS, "propertyNames": {"const": "a"}, "required": ["a"]}, '{"a":1}', "{}"),
        ({**NUMBERS, "propertyNames": {"pattern": "^x_"}}, '{"x_b":1}', '{"b":1}'),
        ({**NUMBERS, "propertyNames": {"minLength": 2, "maxLength": 3.0}}, '{"ab":1}', '{"a":1}'),
        (
            {**NUMBERS, "propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"enum": ["k"]}}},
            *('{"k":1}', '{"a":1}'),
        ),
        ({"type": "array", "items": INTEGER, "uniqueItems": False, "minContains": 1}, "[1]", "1"),
        ({"type": "array", "items": INTEGER, "unevaluatedItems": {}}, "[1]", '["a"]'),
        ({"dependentRequired": {}, "not": False, "dependencies": {}, **INTEGER}, "1", '"a"'),
        (
            {"properties": {"a": INTEGER}, "unevaluatedProperties": False, "type": "object"},
            *('{"a":1}', '{"b":1}'),
        ),
        (
            {**NUMBERS, "unevaluatedProperties": False, "patternProperties": {"^a": {"not": {}}}},
            *('{"b":1}', '{"a":1}'),
        ),
        ({"type": "object", "unevaluatedProperties": {"not": {}, "title": "x"}}, "{}", '{"b":1}'),
        (
            {**CLOSED, "properties": {"a": INTEGER}, "patternProperties": {"^a$": {"minimum": 5}}},
            *('{"a":5}', '{"a":4}'),
        ),
        (
            {"type": "object", "patternProperties": {"^a$": INTEGER}, "minProperties": 1},
            *('{"a":1}', "{}"),
        ),
        ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, "[1]", "[1,2]"),
        ({"type": "array", "unevaluatedItems": INTEGER, "maxItems": 1}, "[1]", '["a"]'),
        ({"type": "string", "maxLength": 2.0, "enum": None, "format": None}, '"ab"', '"abc"'),
        ({"type": "object", "properties": None, "required": None, "items": None}, "{}", "1"),
        ({"const": None}, "null", "1"),
        ({"type": ["string", "null"], "format": "password"}, '"a"', "1"),
        ({"type": "string", "format": "date"}, '"2026-11-28"', '"a"'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"2100-02-29"'),
        ({"type": "string", "format": "date"}, '"0001-04-30"', '"0001-04-31"'),
        ({"type": ["string", "null"], "format": "date"}, "null", '"0000-01-01"'),
        ({"type": "string", "format": "time"}, '"23:59:59.5+01:00"', '"23:59:60Z"'),
        ({"format": "date-time"}, '"2024-02-29T12:00:00Z"', '"2023-02-29T12:00:00Z"'),
        ({"format": "date", "pattern": "^20"}, '"2024-02-29"', '"1999-01-01"'),
        (
            {"format": "date", "pattern": "^20", "allOf": [{"pattern": "1$"}]},
            '"2024-01-01"',
            '"2024-01-02"',
        ),
        ({"$defs": {"A[B] Ü%": INTEGER}, "$ref": "#/$defs/A[B] Ü%"}, "1", '"a"'),
        ({"$defs": {"A|B": INTEGER}, "$ref": "#/$defs/A%7CB"}, "1", '"a"'),
        ({"$id": "my schema", "$defs": {"A": INTEGER}, "$ref": "#/$defs/A"}, "1", '"a"'),
        ({"$schema": "https://json-schema.org/draft-07/schema#", **INTEGER}, "1", '"a"'),
        ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", **INTEGER}, "1", '"a"'),
        (
            {
                "$schema": "https://json-schema.org/draft-04/schema#",
                **{**INTEGER, "minimum": 5, "exclusiveMinimum": True},
            },
            *("6", "5"),
        ),
    ],
)
def test_what_generators_of_schemas_write_is_understood(takes, schema, yes, no):
    grammar = json_schema_grammar(schema)
    assert takes(grammar, yes)
    assert not takes(grammar, no)


def test_a_pattern_of_a_declared_name_lets_an_object_end(tokenizer, vocabulary):
    """After llguidance#265: a comma could follow the last name, and no name could follow it."""
    one = {"properties": {"a": INTEGER}, "patternProperties": {"^a$": {"minimum": 5}}}
    schema = {**CLOSED, **one, "required": ["a"]}
    matcher = matcher_of(vocabulary, made_grammar(lambda: json_schema_grammar(schema), "x"))
    for text, fits in (('{"a":5', True), (",", False)):
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        assert (matcher.validate_tokens(ids) == len(ids)) is fits
        matcher.consume_tokens(ids if fits else [])


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
        {"type": "array", "items": [INTEGER], "unevaluatedItems": False},
        {"type": "string", "pattern": "^(?=a)b|c"},
        {"type": "string", "pattern": "^(?=a)?b"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "^(?=" + "[" * 2000},
        {"type": "string", "pattern": "^(?!a)b"},
    ],
)
def test_what_would_need_more_than_a_grammar_is_refused(schema):
    with pytest.raises(FieldError):
        made_grammar(lambda: json_schema_grammar(schema), "schema")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"^(?=.*[A-Z])(?=.*\d)(?=.*[()|\]\\]).{4,}$", ("Ab1)", "1|aB"), ("ab1)", "Ab))", "A1)")),
        (r"^(?=a|.\))(?=(?:.(\)|x)){2})", ("axbx", "b)cx"), ("cxbx", "axb", "ax")),
        (r"^(?=.{3}$)(a|bb)+$", ("abb", "aaa"), ("bb", "abba")),
    ],
)
def test_look_ahead_at_the_begin_of_a_pattern_is_understood(takes, pattern, yes, no):
    """As Python's own expressions, on which the examples are tried."""
    grammar = json_schema_grammar({"type": "string", "pattern": pattern, "minLength": 1})
    for text in (*yes, *no):
        assert bool(re.search(pattern, text)) == (text in yes)
        assert takes(grammar, json.dumps(text)) == (text in yes), text


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^[^a&&b]{3}$", ("xyz", "[]~"), ("x&y", "axy", "xy")),
        ("^[^+--]{2}$", ("~~", "./"), ("+.", ",.", "-.")),
        ("^[^a~~b]{2}$", ("--", "&x"), ("~x", "ax")),
        ("^[^[]$", ("]", "a"), ("[",)),
        ("^[!-/:-@[-`{-~]{2}$", ("[a~"[::2], "_@"), ("a[", "a")),
        (r"^[A-Z@#\-=[\]{}|;:,.<>?~]{2}$", ("[]", "-=", "A~"), ("ab", "a")),
        (r"^[\w-.]+$", ("a-._",), ("a b", "é")),
        ("^[^]{2}$", ("\n\r", "a😀"), ("a",)),
        ("^(?:[]|a)$", ("a",), ("", "[]")),
        (r"^\cJ\0\x41\u0042\u{43}$", ("\n\0ABC",), ("J0ABC",)),
        (r"^[\ud83d\ude00-\u{1f64f}]\ud83d\ude00$", ("🙂😀",), ("😀", "\ud7ff😀")),
        (r"^\<\/\-\>$", ("</->",), ("/-",)),
        (r"^\s\S$", ("\ufeffx", "\u2028\x85"), ("\x85x", "\x1cx")),
        (r"^\d\D\w\W$", ("1\u0661aé",), ("\u0661xaé", "1xéé")),
        ("^.$", ("a", "\x85"), ("\u2028", "\r", "\n")),
        (r"^[\b]\t\v\f$", ("\b\t\v\f",), ("b\t\v\f",)),
        ("^{a}]{,2}$", ("{a}]{,2}",), ("{a}]]",)),
        ("^(?<x>a)(?:b|c+?)$", ("ab", "accc"), ("a",)),
        ("(^|,)x(,|$)", ("x", "a,x,b"), ("ax", "x.")),
        (r"^\p{Lu}[^\p{L}1]$", ("É2",), ("é2", "Éa", "É1")),
    ],
)
def test_patterns_mean_what_ecma_262_says(takes, pattern, yes, no):
    grammar = json_schema_grammar({"type": "string", "pattern": pattern})
    named = json_schema_grammar({"patternProperties": {pattern: {}}, **CLOSED})
    for text in (*yes, *no):
        assert takes(grammar, json.dumps(text, ensure_ascii=False)) == (text in yes), text
        assert takes(named, json.dumps({text: 1}, ensure_ascii=False)) == (text in yes), text
        if pattern[0] == "^":
            assert takes(regex_grammar(pattern), text) == (text in yes), text


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"a\b", r"(a)\1", r"(?<x>a)\k<x>"),
        *(r"\A", r"\Z", r"\x1", "[a", "a**", "[b-a]", r"\ud800", r"\u{110000}", "(?m)^a"),
    ],
)
def test_what_no_regular_expression_has_is_refused(pattern):
    reason = r"not supported|no escape|no char|order|rep|ECMA|half"
    schema = {"type": "string", "pattern": pattern}
    for make in (lambda: regex_grammar(pattern), lambda: json_schema_grammar(schema)):
        with pytest.raises(FieldError, match=reason):
            made_grammar(make, "x")


@pytest.mark.parametrize(
    ("gbnf", "yes", "no"),
    [
        (r'root ::= "\x41\u00e9\U0001F600\x22\[" # "c', 'Aé😀"[', "Aé"),
        (r"root ::= [\u0041\u00e9-\u00ef]+", "Aéï", "B"),
        (r"root ::= [a&&b~~c\-d]+", "a&b~c-d", "e"),
        (r'root ::= [^"\\\x7F\x00-\x1F]+', "a/é[b", 'a"'),
        ('root ::= . "\t" .', "a\t\n", "a\t"),
        ('\ufeffstart-1 ::= "x"\nroot ::= start-1', "x", "y"),
        ('root ::= start end\nstart ::= "s"\nend ::= "e"', "se", "s"),
        ('root ::= ab Ab AB\nab ::= "x"\nAb ::= "y"\nAB ::= "z"', "xyz", "xxx"),
        ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', "xy", "xx"),
        ('root ::= _x x1 import\n_x ::= "a"\nx1 ::= "b"\nimport ::= "c"', "abc", "ab"),
        ('?start: "a" | start "b"', "ab", "b"),
        ('root ::= word "x"\nword ::= [a-z]+', "abx", "ab"),
        ('root ::= word "1" | "abc" "2"\nword ::= [a-z]+', "ab1", "ab2"),
        ('root ::= [a-z]+ | "abc" [0-9]', "ab", "ab5"),
        ('root ::= (("ba")* "c"?){2,3}', "bacbac", "ab"),
        ('root ::= item ("," item)*\nitem ::= [^,]+', "a,b", "a,,b"),
    ],
)
def test_grammars_in_llama_cpps_form_mean_what_they_say(takes, gbnf, yes, no):
    grammar = context_free_grammar(gbnf)
    assert takes(grammar, yes)
    assert not takes(grammar, no)


MANY = range(300)
EMPTY_TREE = [f"t{i} ::= t{i + 1} t{i + 1}" for i in MANY]
TERMINAL_CHAIN = [f'r{i} ::= r{i + 1} "x" | "a"' for i in MANY]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "gbnf",
    [
        'root ::= w ("1" w)*\nw ::= (' + " | ".join(["[a-z]"] * 300) + ")*",
        'root ::= w ("1" w)*\nw ::= ' + " ".join(["[a-z]?"] * 300),
        "\n".join(["root ::= t0 [a-z]*", *EMPTY_TREE, 't300 ::= ""']),
        "\n".join(["root ::= r0", *TERMINAL_CHAIN, 'r300 ::= "b"']),
    ],
    ids=["pairs", "optional", "doubling", "chain"],
)
def test_a_grammar_whose_lexemes_are_many_is_read_in_bounded_time(gbnf):
    """Without bounds, these take hours, or more frames than Python has."""
    assert "TERMINAL" not in context_free_grammar(gbnf)


def random_rule(draw, depth, names=()):
    """A rule of GBNF, and the same as a regular expression."""
    match draw.randrange(3, 7) if depth else draw.randrange(3):
        case 0 | 1:
            text = "".join(draw.choice("abc") for _ in range(draw.randint(1, 3)))
            return f'"{text}"', text
        case 2 if names:
            return draw.choice(names)
        case 2:
            return (draw.choice(["[ab]", "[^a]", "[a-c]"]),) * 2
        case 3:
            gbnf, regex = random_rule(draw, depth - 1, names)
            sign = draw.choice(["*", "+", "?", "{1,2}", "{2}"])
            return f"({gbnf}){sign}", f"(?:{regex}){sign}"
        case 4:
            one, other = (random_rule(draw, depth - 1, names) for _ in range(2))
            return f"({one[0]} | {other[0]})", f"(?:{one[1]}|{other[1]})"
    one, other = (random_rule(draw, depth - 1, names) for _ in range(2))
    return f"{one[0]} {other[0]}", f"(?:{one[1]})(?:{other[1]})"


@pytest.mark.parametrize("seed", range(4))
def test_grammars_in_llama_cpps_form_take_what_regular_expressions_take(takes, seed):
    draw = random.Random(seed)
    for _ in range(25):
        word, regex = random_rule(draw, 2)
        root, whole = random_rule(draw, 3, [("word", f"(?:{regex})")])
        grammar = context_free_grammar(f"root ::= {root}\nword ::= {word}")
        for length in range(8):
            text = "".join(draw.choice("abcd") for _ in range(length))
            assert takes(grammar, text) == bool(re.fullmatch(whole, text)), (root, word, text)


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "integer"}, "ci": {}},
    "required": ["unit", "zip"],
}
TREE = {
    "$defs": {
        "node": {
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value"],
        }
    },
    "type": "array",
    "items": {"$ref": "#/$defs/node"},
    "minItems": 2,
    "maxItems": 3,
}
QUOTED = {
    "type": ["object", "null"],
    "properties": {'"q\\': {"type": "integer"}, "a\n": {"const": "\x01"}, "no": False},
    "additionalProperties": {"type": "boolean"},
}
MERGED = {"type": "object", "allOf": [{"properties": {"a": INTEGER}, "required": ["a"]}]}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (CITY, '{"city":"x","unit":1,"zip":[],"ci":2,"cit":3}', '{"unit":1}'),
        (CITY, '{"unit":1,"zip":0,"new":{},"city":"x","unit":2}', '{"unit":1,"zip":0,"city":2}'),
        (CITY, '{ "unit" : 1,\n\t"zip":0}', '{"un\\u0069t":1,"zip":0}'),
        (CITY, '{"unit":1,"zip":0}', '{"unit":1,"zip":0,"cit\\u0079":0}'),
        (TREE, '["a",{"value":1,"b":2,"next":null,"value":1}]', "[1]"),
        (TREE, '[1,{"value":1,"x":0,"next":null}]', '[1,{"value":1,"x":0,"next":{"value":""}}]'),
        (TREE, "[1,2,3]", "[1,2,3,4]"),
        (QUOTED, '{"x":true,"a\\n":"\\u0001","\\"q\\\\":3}', '{"no":true}'),
        (QUOTED, "null", '{"\\u0022q\\u005c":true}'),
        (QUOTED, "{}", '{"a\\u000a":true}'),
        (MERGED, '{"a":1,"b":"x"}', '{"a":1,"\\u0061":"x"}'),
    ],
)
def test_a_declared_name_can_be_written_behind_others(takes, schema, yes, no):
    """And has one spelling, so that no value gets by its type."""
    grammar = json_schema_grammar(schema)
    assert takes(grammar, yes)
    assert not takes(grammar, no)


def test_names_that_are_others_begin_can_be_closed(takes):
    names = ["a", "ab", "abc", "b"]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    grammar = json_schema_grammar(schema)
    for order in permutations(names):
        assert takes(grammar, json.dumps(dict.fromkeys(["x", *order])))


def test_keywords_are_looked_for_where_schemas_are():
    schema = {"properties": {"format": {"const": None}}, "default": {"format": "x", "enum": None}}
    assert plain_schema(schema) == schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_schema_grammar({"type": "thing"}),
        lambda: json_schema_grammar({"type": "object", "propertyNames": {"format": "uuid"}}),
        lambda: json_schema_grammar({"type": "string", "format": "uri-template"}),
        lambda: json_schema_grammar({"type": "array", "uniqueItems": True}),
        lambda: json_schema_grammar({"$ref": "#/$defs/none"}),
        lambda: regex_grammar("("),
        lambda: context_free_grammar("start: other"),
        lambda: choice_grammar(["x" * 600_000]),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field(make):
    with pytest.raises(FieldError) as refused:
        made_grammar(make, "response_format")
    assert refused.value.field == "response_format"
    assert len(str(refused.value)) < 700


def test_an_object_may_have_only_so_many_properties_that_any_place_may_hold(tokenizer, vocabulary):
    """Up to the bound a list of such objects is matched to its end; required ones do not count."""
    properties = {f"p{i}": {"type": "number"} for i in range(MAX_OPTIONAL)}
    made = json_schema_grammar({"items": {"type": "object", "properties": properties}})
    matcher = matcher_of(vocabulary, made)
    for token in tokenizer.backend.encode('[{"p3":1},{"p7":2,"x":[]},{}]').ids:
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    more = {**properties, "one": {"type": "number"}}
    json_schema_grammar({"properties": more, "required": ["one"]})
    with pytest.raises(ValueError, match="400 properties that are not required"):
        json_schema_grammar({"items": {"properties": more, "required": ["other", 1]}})


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("way", KNOWN_MARKS, ids=str)
def test_an_answer_may_follow_thinking(takes, way, opened):
    thinking = msgspec.structs.replace(way, opened=opened)
    plain = json_schema_grammar({"type": "integer"})
    begin, end = "" if opened else f"{way.begin}\n", f"{way.end}\n\n"
    grammar = after_thinking(plain, lambda _: None, thinking)
    assert takes(grammar, begin + f"So 1 and {{2}}\nit is.\n{end}12")
    assert not takes(grammar, begin + f"So 1 and 2\n{end}x")
    assert takes(grammar, "12") is not opened
    assert not takes(grammar, f"{begin}So{way.end}" + "\n" * 33 + "12")  # it would go on so
    for other in (
        choice_grammar(["a", "b"]),
        regex_grammar("a|b"),
        context_free_grammar('start: "a"'),
    ):
        assert takes(after_thinking(other, lambda _: None, thinking), begin + f"hm{end}a")
    calls = calls_grammar("hermes", [NOTHING], lambda _: None, several=False)
    called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert takes(after_thinking(calls, lambda _: None, thinking), begin + f"hm{end}{called}")


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(length):
    """A schema whose references would have the compiler recurse to the end of its stack."""
    made = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)
    }
    return {"$defs": {**made, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


MANY_TOOLS = [
    Tool(f"tool{i}", {**nested(20), "required": ["a", f"r{i}"]}, strict=True) for i in range(128)
]
HOSTILE = {
    "deep": lambda: json_schema_grammar(nested(60)),
    "repeated": lambda: regex_grammar("((a{1,1000}){1,1000}){1,1000}"),
    "alternatives": lambda: regex_grammar("|".join(f"w{i}x*" for i in range(20_000))),
    "wide": lambda: json_schema_grammar({"enum": [f"v{i}" for i in range(40_000)]}),
    "properties": lambda: json_schema_grammar(
        {"properties": {f"p{i}": {"type": "number"} for i in range(3_000)}}
    ),
    "optional": lambda: json_schema_grammar(
        {"items": {"properties": {f"p{i}": {"type": "number"} for i in range(MAX_OPTIONAL)}}}
    ),
    "itself": lambda: json_schema_grammar({"$ref": "#"}),
    "circle": lambda: json_schema_grammar(
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    ),
    "ambiguous": lambda: context_free_grammar('start: start start | "a" | '),
    "bounds": lambda: json_schema_grammar({"type": "string", "minLength": 10**9}),
    "items": lambda: json_schema_grammar({"type": "array", "minItems": 10**9}),
    "anyOf": lambda: json_schema_grammar(
        {"anyOf": [{"properties": {f"a{i}": {"const": i}}} for i in range(2_000)]}
    ),
    "doubling": lambda: json_schema_grammar(
        {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "allOf": lambda: json_schema_grammar(
        {"allOf": [{"properties": {f"a{i}": {"minimum": i}}} for i in range(1_000)]}
    ),
    "patterns": lambda: json_schema_grammar(
        {"patternProperties": {f"^(a*)*{i}$": {"type": "string"} for i in range(300)}}
    ),
    "chain": lambda: json_schema_grammar(chain(3_000)),
    "lists": lambda: calls_grammar(
        "hermes", [Tool("t", chain(20_000))], lambda _: None, several=True
    ),
    "hidden": lambda: context_free_grammar("start: %json " + json.dumps(chain(3_000))),
    "stars": lambda: regex_grammar("(((a*)*)*)*b" * 500),
    "classes": lambda: regex_grammar(r"(\p{L}|\p{N}){1,5000}x"),
    "rules": lambda: context_free_grammar(
        "\n".join(
            ["start: r0", *[f"r{i}: r{i + 1} r{i + 1} |" for i in range(3_000)], 'r3000: "a"']
        )
    ),
    "strict tools": lambda: strict_grammar("hermes", MANY_TOOLS, lambda _: None, several=True),
    "calls": lambda: calls_grammar("qwen3_coder", MANY_TOOLS, lambda _: None, several=True),
    "a tool in itself": lambda: strict_grammar(
        "mistral", [Tool("t", {"$ref": "#"}, strict=True)], lambda _: None, several=True
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_cost_a_bounded_time(vocabulary, name):
    """Each is refused, or its matcher and first masks are there within seconds on any machine."""
    begun = time.process_time()
    try:
        grammar = made_grammar(HOSTILE[name], "x")
    except FieldError:
        pass
    else:
        matcher = matcher_of(vocabulary, grammar)
        for _ in range(5):
            if matcher.is_error() or matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
            token = next(i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1)
            matcher.consume_token(token)
    assert time.process_time() - begun < 20  # the largest takes 4 on a busy machine


def test_what_a_matcher_finds_wrong_is_not_in_the_log(vocabulary, capfd):
    """The library would write it to standard error, a line for each request of a client."""
    matcher = matcher_of(vocabulary, regex_grammar("a<"))
    other = matcher.deep_copy()
    for each in (matcher, other):
        assert not each.consume_token(5)
    assert "satisfy the grammar" in problem_of(other)
    assert "<" not in problem_of(other)
    assert capfd.readouterr().err == ""


QWEN3_CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>"
)
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": QWEN3_CODER.replace("tool_call", "seed:tool_call"),
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "mistral_args": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
    "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}",
    "granite": MISTRAL.replace("[TOOL_CALLS]", "<|tool_call|>"),
    "glm4_0414": 'weather\n{"city": "Rome"}<|assistant|>f\n{}',
    "phi4_mini_json": MISTRAL.replace("[TOOL_CALLS]", "functools"),
    "llama_nemotron_json": MISTRAL.replace("[TOOL_CALLS]", "<TOOLCALL>") + "</TOOLCALL>",
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_31,
    "pythonic": PYTHONIC,
    "glm45": GLM45,
    "minimax_m2": MINIMAX,
    "minicpm5": MINICPM5,
    "hunyuan_a13b": MISTRAL.replace("[TOOL_CALLS]", "<tool_calls>") + "</tool_calls>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>'
    "<|tool_call>call:f{}<tool_call|>",
    "lfm2": f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>",
    "olmo3": '<function_calls>\nweather(city="Rome")\nf()\n</function_calls>',
}


@pytest.mark.parametrize("form", FORMATS)
def test_enforced_calls_are_those_that_the_parser_reads(takes, form):
    grammar = calls_grammar(form, [WEATHER, NOTHING], lambda _: None, several=True)
    types = parameter_types([WEATHER, NOTHING])
    _, content, calls = read(ToolCallParser(FORMATS[form], types), [CALLS[form]])
    assert [(name, json.loads(text)) for name, text in calls] == [
        ("weather", {"city": "Rome"}),
        ("f", {}),
    ]
    assert not content
    assert takes(grammar, CALLS[form])
    single = calls_grammar(form, [WEATHER], lambda _: None, several=False)
    assert not takes(single, CALLS[form])
    assert not takes(grammar, re.sub("Rome", "", CALLS[form]).replace("city", "town"))


LISTED = Tool(
    "listed",
    {
        "$defs": {"Unit": {"enum": ["km", "m"]}},
        "type": "object",
        "properties": {"all": {"type": "array", "items": {"$ref": "#/$defs/Unit"}}},
        "required": ["all"],
        "additionalProperties": False,
    },
    strict=True,
)


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_with_a_format_may_be_a_call_instead(takes, form):
    tools = with_open_arguments([WEATHER, NOTHING])
    town = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}
    schema = Schema({**town, "additionalProperties": False})
    job = GrammarJob("response_format", schema, calls=Calls(form, tools, True, False))
    grammar = maker(job, lambda _: None)()
    before = ANSWERS.get(form, "")
    assert takes(grammar, before + '{"city": "Rome"}')
    assert takes(grammar, CALLS[form])
    assert takes(grammar, CALLS[form].replace("city", "town"))  # the tool is not strict
    for wrong in ("It is warm.", '{"city": "Lima"}', "", '{"city": "Rome"}' + CALLS[form]):
        assert not takes(grammar, before + wrong)
    strict = msgspec.structs.replace(WEATHER, strict=True)
    enforced = Calls(form, with_open_arguments([strict, NOTHING, LISTED]), True, False)
    grammar = maker(msgspec.structs.replace(job, calls=enforced), lambda _: None)()
    assert takes(grammar, before + '{"city": "Rome"}')
    assert takes(grammar, CALLS[form])
    assert not takes(grammar, CALLS[form].replace("city", "town"))


def either(form):
    """A reader of answers that follow a format or are calls."""
    asked = FormatOptions([WEATHER, NOTHING], constraint=("response_format", Schema({})))
    return ModelFormats("", form, shows_tools=True).of(asked, "a").reader()


LIKE_CALLS = {
    "a person": ("llama3_json", '{"name": "Tom", "parameters": {"age": 3}}'),
    "people": ("llama3_json", '[{"name": "Tom", "parameters": {"age": 3}}]'),
    "a person with the name of a tool": ("llama3_json", '{"name": "weather", "age": 3}'),
    "a beginning": ("llama3_json", '{"name": "weather", "para'),
    "a sentence": ("pythonic", '{"plan": "use [weather(city=1)] now"}'),
    "a list": ("pythonic", '["weather", "use [weather(city=1)] now"]'),
    "marks": ("glm45", '{"plan": "<tool_call>x</tool_call>"}'),
    "an empty list": ("mistral", '{"plan": "[TOOL_CALLS][] it"}'),
    "an empty list alone": ("mistral", "[TOOL_CALLS][]"),
    "an unknown tool": ("hermes", ' <tool_call>{"name": "x", "arguments": {}}</tool_call> '),
    "white space": ("hermes", " \n"),
    **{f"{form} in a string": (form, json.dumps({"plan": CALLS[form]})) for form in FORMATS},
    **{f"{form} in a line": (form, f'{{"a": "\n{CALLS[form]}"}}\n') for form in FORMATS},
}


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("case", LIKE_CALLS)
def test_an_answer_in_a_format_is_text_whatever_it_holds(case, size):
    form, text = LIKE_CALLS[case]
    reader = either(form)
    for at in range(0, len(text), size):
        reader.read(text[at : at + size], ended=False)
    reader.read("", ended=True)
    assert (reader.content, reader.calls) == (text, [])


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_in_a_format_is_passed_on_as_it_is_written(form):
    reader = either(form)
    for size, char in enumerate('{"plan": "first", "name": "weather"}', 1):
        reader.read(char, ended=False)
        assert len(reader.content) == size or size < 3  # '{"' may begin a call


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("form", FORMATS)
def test_calls_in_place_of_an_answer_are_read_as_they_come(form, size):
    reader, text, named = either(form), CALLS[form], 0
    for at in range(0, len(text), size):
        reader.read(text[at : at + size], ended=False)
        named = named or (at + size) * len(reader.calls)
    assert 0 < named < len(text) or size > 1
    reader.read("", ended=True)
    calls = [(call.name, json.loads(call.arguments)) for call in reader.calls]
    assert calls == [("weather", {"city": "Rome"}), ("f", {})]
    assert reader.content == ""


def test_calls_without_marks_refer_to_their_own_definitions(takes):
    job = GrammarJob("response_format", Schema({"type": "integer"}))
    job = msgspec.structs.replace(job, calls=Calls("llama3_json", [LISTED], False, False))
    grammar = maker(job, lambda _: None)()
    call = '{"name": "listed", "parameters": {"all": ["km"]}}'
    assert takes(grammar, call)
    assert not takes(grammar, call.replace("km", "mile"))
    assert takes(grammar, "12")


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ('b="x"', True),
        ('a=1, b="x"', True),
        ('b="x\\\\, ]\\n", c=[null, {"d": true}]', True),
        ('a=1, b="x", c=[]', True),
        ("", False),
        ("a=1", False),
        ('b="x", a=1', False),
        (', b="x"', False),
        ('b="x", ', False),
        ("b=1", False),
    ],
)
def test_named_arguments_are_enforced_in_the_order_of_the_schema(takes, arguments, taken):
    properties = {"a": INTEGER, "b": {"type": "string"}, "c": {"$ref": "#/$defs/list"}}
    defined = {"list": {"type": "array"}}
    tool = Tool("f", {"properties": properties, "required": ["b"], "$defs": defined})
    grammar = calls_grammar("pythonic", [tool], lambda _: None, several=True)
    call = f"[f({arguments}), f({arguments})]"
    assert takes(grammar, call) == taken
    if taken:
        _, _, found = read(ToolCallParser(FORMATS["pythonic"], parameter_types([tool])), [call])
        named = re.findall(r"([abc])=(.+?)(?=, [abc]=|$)", arguments)
        said = {name: json.loads(value) for name, value in named}
        assert [(name, json.loads(each)) for name, each in found] == [("f", said)] * 2


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("pythonic", "[f(b=1)]"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=b>\n1\n</parameter>\n</function>\n"),
    ],
)
def test_a_parameter_that_can_have_no_value_is_not_given(takes, form, call):
    whole = {"properties": {"a": False, "b": INTEGER}}
    grammar = calls_grammar(form, [Tool("f", whole)], lambda _: None, several=True)
    assert takes(grammar, call + "</tool_call>" * (form == "qwen3_coder"))
    with pytest.raises(ValueError, match="parameter 'a' is required and can have no value"):
        calls_grammar(form, [Tool("f", {**whole, "required": ["a"]})], lambda _: None, several=True)


def test_a_parameter_that_has_no_name_as_in_python_is_refused():
    tool = Tool("f", {"properties": {"a b": INTEGER}})
    with pytest.raises(ValueError, match=r"the parameter 'a b' of f has no name as in Python"):
        calls_grammar("pythonic", [tool], lambda _: None, several=True)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_strict_tools_are_enforced_where_the_model_is_free_to_call(tokenizer, takes, form, added):
    """Whatever the marks are, the text before a call is free, and all that is read as one is."""
    if form == "pythonic" and added:
        pytest.skip("a bracket is no special token")
    first, *others = {"glm4_0414": [ASSISTANT], "pythonic": ["["]}.get(form) or OPENINGS[form]
    mark_of = {first: "<|im_start|>"} if added else {}

    def token_of(mark):
        return tokenizer.backend.token_to_id(mark_of[mark]) if mark in mark_of else None

    def whether(text, grammar=None):
        for mark, special in mark_of.items():
            text = text.replace(mark, special)
        return takes(grammar or several, text)

    strict = Tool(WEATHER.name, WEATHER.parameters, strict=True)
    several = strict_grammar(form, [strict, NOTHING], token_of, several=True)
    call = CALLS[form]
    called = call if call.startswith(first) else first + call
    assert all(map(whether, ("", "Hello {a} <tool [TOOL", "It is <b>warm</b>.\n", call)))
    assert whether("I will look.\n" + called)
    assert not whether("I will look. " + called.replace("city", "town"))
    assert not whether(call.replace("city", "town"))
    for other in others:
        assert whether("So:\n" + other + called.removeprefix(first))
        assert not whether(other + called.removeprefix(first).replace("city", "town"))
    text = form in ("glm4_0414", "pythonic") and not added  # it has no tool's name
    assert whether("So " + called.replace("weather", "other")) == text
    assert not whether(called[: called.index("city")])
    single = strict_grammar(form, [strict, NOTHING], token_of, several=False)
    assert not whether(call, single)
    loose = strict_grammar(form, [Tool(WEATHER.name, None), NOTHING], token_of, several=True)
    assert whether(call.replace("city", "town"), loose)


def test_strict_tools_follow_thinking(takes):
    strict = Tool(WEATHER.name, WEATHER.parameters, strict=True)
    calls = strict_grammar("hermes", [strict], lambda _: None, several=True)
    call = CALLS["hermes"].split("\n<tool_call>")[0]
    for opened, begin in ((True, ""), (False, "<think>\n")):
        grammar = after_thinking(calls, lambda _: None, ThinkingMarks(opened=opened))
        assert takes(grammar, f"{begin}Rome?\n</think>\n\nLooking.\n{call}")
        assert not takes(grammar, f"{begin}Rome?\n</think>\n\n" + call.replace("city", "town"))


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string", "enum": ["a b", '"q"']}, "a b", "a b"),
        ({"type": "string", "enum": ["a b", '"q"']}, '"q"', '"q"'),
        ({"const": "7", "type": "string"}, "7", "7"),
        ({"enum": ["x", 1, None]}, "x", "x"),
        ({"enum": ["x", 1, None]}, "1", 1),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "Rome", "Rome"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Unit"}, "km", "km"),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "default": "km"}, "km", "km"),
        ({"type": "array", "items": {"$ref": "#/$defs/Unit"}}, '["km"]', ["km"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        (True, '"a"', "a"),
    ],
)
def test_values_in_xml_are_enforced_as_the_parser_reads_them(takes, schema, written, value):
    properties = {"p": schema}
    defined = {"Unit": {"type": "string", "enum": ["km", "mi"]}}
    tool = Tool("f", {"properties": properties, "required": ["p"], "$defs": defined})
    grammar = calls_grammar("qwen3_coder", [tool], lambda _: None, several=False)
    call = "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert takes(grammar, call.format(written))
    parser = ToolCallParser(FORMATS["qwen3_coder"], parameter_types([tool]))
    assert read(parser, [call.format(written)])[2] == [("f", json.dumps({"p": value}))]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('s:<|"|>a "b", {c}\n<|"|>', {"s": 'a "b", {c}\n'}),
        ('n:1,s:<|"|><|"|>,u:<|"|>km<|"|>', {"n": 1, "s": "", "u": "km"}),
        ('s:<|"|>x<|"|>,u:null,l:["km"],o:{"a": {"b": "c"}}', {
            "s": "x", "u": None, "l": ["km"], "o": {"a": {"b": "c"}}}),
        ("n:1", None),
        ('s:<|"|>x<|"|>,n:1', None),
        ('s:"x"', None),
        ('s:<|"|>x<|"|>,u:<|"|>ft<|"|>', None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("added", [False, True])
def test_values_of_gemma_4_are_enforced_as_the_parser_reads_them(
    tokenizer, takes, arguments, value, added
):
    properties = {
        "n": INTEGER,
        "s": {"type": "string"},
        "u": {"enum": ["km", None]},
        "l": {"type": "array", "items": {"$ref": "#/$defs/unit"}},
        "o": {"type": "object"},
    }
    defined = {"unit": {"type": "string", "enum": ["km", "mi"]}}
    tool = Tool("f", {"properties": properties, "required": ["s"], "$defs": defined})
    call = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    special = {'<|"|>': "<|im_start|>"} if added else {}

    def token_of(mark):
        return tokenizer.backend.token_to_id(special[mark]) if mark in special else None

    grammar = calls_grammar("gemma4", [tool], token_of, several=True)
    written = call.replace('<|"|>', "<|im_start|>") if added else call
    assert takes(grammar, written) == (value is not None)
    if value is not None:
        assert takes(grammar, written * 2)
        parser = ToolCallParser(FORMATS["gemma4"], parameter_types([tool]))
        [(name, found)] = read(parser, [call])[2]
        assert (name, json.loads(found)) == ("f", value)


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        ({"pattern": "^[a-c]+$", "maxLength": 3}, ["abc"], ["abca", "abx", ""]),
        ({"pattern": "b"}, ["abc\n"], ["aac"]),
        ({"pattern": "a|b"}, ["xay"], ["xyz"]),
        ({"pattern": "^(?=.*[0-9])(?=.*[a-z]).{2,}$"}, ["a1"], ["ab", "12"]),
        ({"pattern": "(?i)^a\\/b$"}, ["A/b"], ["a"]),
        ({"minLength": 1, "maxLength": 2}, ["é🙂"], ["", "abc"]),
        ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_text_outside_of_json_has_its_pattern_and_length(
    tokenizer, takes, schema, fits, others, added
):
    properties = {"p": {"type": "string", **schema}, "q": {"type": ["string", "null"], **schema}}
    tool = Tool("f", {"properties": properties, "required": ["p"]})
    quote = "<|im_start|>" if added else '<|"|>'

    def token_of(mark):
        return tokenizer.backend.token_to_id(quote) if added and mark == '<|"|>' else None

    forms = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "gemma4": f"<|tool_call>call:f{{{{p:{quote}{{}}{quote}}}}}<tool_call|>",
    }
    for form, call in forms.items():
        grammar = calls_grammar(form, [tool], token_of, several=False)
        assert all(takes(grammar, call.format(text)) for text in fits), form
        assert not any(takes(grammar, call.format(text)) for text in others), form


def test_text_with_a_pattern_ends_at_its_first_mark_as_for_the_parser(tokenizer, takes):
    tool = Tool("f", {"properties": {"p": {"type": "string", "pattern": "b"}}, "required": ["p"]})
    forms = {
        "qwen3_coder": (
            "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>",
            "\n</parameter>\n",
        ),
        "glm45": (
            "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
            "</arg_value>",
        ),
        "gemma4": ('<|tool_call>call:f{{p:<|"|>{}<|"|>}}<tool_call|>', '<|"|>'),
    }
    for form, (call, mark) in forms.items():
        grammar = calls_grammar(form, [tool], lambda _: None, several=False)
        assert takes(grammar, call.format("a<b")), form
        assert not takes(grammar, call.format(f"a{mark}b")), form


def test_a_pattern_that_cannot_be_enforced_as_text_is_refused():
    tool = Tool("f", {"properties": {"p": {"type": "string", "pattern": "^a|b$"}}})
    with pytest.raises(ValueError, match="anchors in alternatives"):
        calls_grammar("qwen3_coder", [tool], lambda _: None, several=False)
    calls_grammar("hermes", [tool], lambda _: None, several=False)


def test_values_of_gemma_4_that_spell_a_special_token_are_text():
    tool = Tool("f", {"properties": {"p": {"enum": ["</s>", ""]}}, "required": ["p"]})
    asked = []
    calls_grammar("gemma4", [tool], asked.append, several=False)
    assert "</s>" not in asked


def test_gemma_4_may_think_before_an_answer_whose_form_is_enforced(tmp_path):
    """Its opening mark is a special token and a word."""
    thinking = next(each for each in KNOWN_MARKS if each.end == "<channel|>")
    made = codec(write(tmp_path, byte_level(added=["<|channel>", thinking.end])))
    grammar = after_thinking(json_schema_grammar({"type": "integer"}), made.token_of, thinking)

    def takes(text):
        matcher = matcher_of(made.vocabulary().matching([2]), check_grammar(grammar, "x"))
        ids = made.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert takes(f"{thinking.begin}\nHm 1{thinking.end}12")
    assert takes("12")
    assert not takes(f"{thinking.begin}\nHm 1{thinking.end}x")


def test_types_of_schemas_that_refer_to_each_other_are_found_in_bounded_time():
    circle = {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "null"}]}
    doubled = {
        f"x{i}": {
            "anyOf": [{"$ref": f"#/$defs/x{i + 1}"}, {"$ref": f"#/$defs/x{i + 1}", "title": ""}]
        }
        for i in range(64)
    }
    deep = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    properties = {"circle": circle, "doubled": {"$ref": "#/$defs/x0"}, "deep": deep}
    defined = {"circle": circle, **doubled, "x64": {"type": "string"}}
    many = {str(i): {"enum": ["a"] * 100} for i in range(100)}
    tools = [
        Tool("f", {"properties": properties, "$defs": defined}),
        Tool("g", {"properties": many}),
    ]
    found = parameter_types(tools)
    text = frozenset({"string"})
    assert found["f"] == {"circle": frozenset({"null"}), "doubled": text, "deep": text}
    assert 0 < len(found["g"]) < len(many)  # there were no looks left


@pytest.mark.parametrize(
    ("parameters", "yes", "no"),
    [
        (None, "{}", '{"a": 1}'),
        ({}, '{"a": 1}', "1"),
        ({"properties": {"a": INTEGER}}, '{"a": 1}', "1"),
        ({"type": None, "anyOf": [{}]}, "{}", "[]"),
    ],
)
def test_arguments_are_an_object(takes, parameters, yes, no):
    tool = Tool("f", parameters)
    grammar = calls_grammar("hermes", [tool], lambda _: None, several=False)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert takes(grammar, call % yes)
    assert not takes(grammar, call % no)


def test_what_stays_within_the_bounds_is_served(takes):
    """Chains of rules and references, and patterns, as long as they may be."""
    rules = "\n".join(["start: r1", *[f"r{i}: r{i + 1}" for i in range(1, 499)], 'r499: "a"'])
    assert takes(context_free_grammar(rules), "a")
    with pytest.raises(ValueError, match="501 rules"):
        context_free_grammar(rules + '\nr500: "b"')
    check_grammar(json_schema_grammar(chain(400)), "x")
    patterns = {f"^x{i}$": {"type": "integer"} for i in range(64)}
    assert takes(json_schema_grammar({"type": "object", "patternProperties": patterns}), '{"x7":1}')


def test_calls_have_no_arguments_but_those_that_a_tool_names():
    named = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert Tool("f", named).schema == {**named, "additionalProperties": False}
    for schema in (
        {"type": "object"},
        {**named, "additionalProperties": {"type": "integer"}},
        {**named, "patternProperties": {"^x": True}},
        {**named, "required": ["a", "other"]},
        {**named, "allOf": [{"required": ["b"]}]},
    ):
        assert Tool("f", schema).schema == schema
