"""Objects of schemas that leave their other names open, closed as an option asks."""

import itertools
import json
import random

import jsonschema_rs
import pytest

from twolane.common.errors import FieldError
from twolane.frontend.structured.closing import closed
from twolane.frontend.structured.grammar import json_schema_grammar, made_grammar
from twolane.frontend.structured.schema import plain_schema
from twolane.frontend.structured.tools import Tool, calls_grammar, strict_grammar

from .test_structured import takes, vocabulary  # noqa: F401  # fixtures

A, B = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/N"}}}
MERGED = {
    "$defs": {"N": {"allOf": [{"properties": {"next": {"$ref": "#/$defs/N"}}}, B]}},
    "$ref": "#/$defs/N",
}
EXTENDED = {
    "$defs": {"A": A, "open 0": B},
    "properties": {
        "both": {"$ref": "#/$defs/A", "properties": {"c": {"type": "null"}}},
        "one": {"$ref": "#/$defs/A", "description": "alone"},
    },
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (A, ["{}", '{"a":1}'], ['{"b":1}', '{"a":1,"b":1}']),
        ({"properties": {}, "type": "object"}, ["{}"], ['{"a":1}']),
        ({"type": "object"}, ['{"b":1}'], []),
        ({"type": "object", "required": ["a"]}, ['{"a":1,"b":1}'], []),
        ({**A, "required": ["a", "b"]}, ['{"a":1,"b":"x"}'], ['{"a":1,"b":1,"c":1}']),
        ({**A, "additionalProperties": True}, ['{"b":1}'], []),
        ({**A, "additionalProperties": B}, ['{"b":{"b":1}}'], ['{"b":{"c":1}}']),
        ({**A, "additionalProperties": None}, ['{"a":1}'], ['{"b":1}']),
        ({"properties": {"in": {"items": A, "type": "array"}}}, ['{"in":[{"a":1}]}'],
         ['{"in":[{"b":1}]}', '{"out":1}']),
        ({"type": "array", "prefixItems": [A], "items": B}, ['[{"a":1},{"b":1}]'],
         ['[{"b":1}]', '[{"a":1},{"a":1}]']),
        ({"$defs": {"N": NODE}, "$ref": "#/$defs/N"}, ['{"v":1,"next":{"v":2}}'],
         ['{"v":1,"next":{"w":2}}', '{"w":1}']),
        ({"definitions": {"A": A}, "allOf": [{"$ref": "#/definitions/A"}]}, ['{"a":1}'],
         ['{"b":1}']),
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1,"c":2}', '{"a":"x"}', '{"b":"x"}']),
        ({"allOf": [A, {**B, "additionalProperties": {"type": "integer"}}]}, ['{"c":2}'], []),
        (MERGED, ['{"next":{"next":{"b":1},"b":2}}'], ['{"next":{"c":1}}', '{"next":{"b":""}}']),
        (EXTENDED, ['{"both":{"a":1,"c":null},"one":{"a":1}}'],
         ['{"one":{"c":null}}', '{"both":{"d":1}}', '{"both":{"a":"x"}}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"c":1}']),
        ({"anyOf": [A, {"type": "null"}, {"type": "object"}]}, ["null", '{"c":1}'], ['["a"]']),
        ({**A, "anyOf": [{**B, "required": ["b"]}, {"required": ["a"]}]},
         ['{"a":1}', '{"b":2}', '{"a":1,"b":2}'], ["{}", '{"a":1,"c":2}', '{"b":"x"}']),
        ({**A, "anyOf": [True]}, ['{"a":1}'], ['{"b":1}']),
        ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, ['{"x1":null}'],
         ['{"y":1}', '{"x":1}']),
        ({**A, "allOf": [{"patternProperties": {"^x": {"type": "null"}}}]}, ['{"a":1,"x1":null}'],
         ['{"y":1}', '{"x":1}', '{"a":null}']),
        ({"enum": [{"a": 1, "b": 2}], **A}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({**A, "unevaluatedProperties": {"type": "null"}}, ['{"b":null}'], ['{"b":1}']),
        ({"properties": {"p": {**A, "default": {"properties": 1}}}}, ['{"p":{"a":1}}'],
         ['{"p":{"b":1}}']),
        ({"properties": {"p": {"$ref": "#/properties/q"}, "q": A}}, ['{"p":{"a":1}}'],
         ['{"p":{"b":1}}']),
    ],
)  # fmt: skip
def test_declared_names_alone_can_be_written(takes, schema, yes, no):  # noqa: F811
    opened, shut = json_schema_grammar(schema), json_schema_grammar(schema, closes=True)
    for text in yes:
        assert takes(shut, text), text
        assert takes(opened, text), text
    for text in no:
        assert not takes(shut, text), text


def test_branches_of_one_of_that_exclude_each_other_once_closed_are_served(takes):  # noqa: F811
    """Open, both may hold for one value, which no grammar can forbid."""
    schema = {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]}
    with pytest.raises(FieldError, match="oneOf"):
        made_grammar(lambda: json_schema_grammar(schema), "x")
    grammar = json_schema_grammar(schema, closes=True)
    assert takes(grammar, '{"a":1}')
    assert takes(grammar, '{"b":1}')
    assert not takes(grammar, '{"a":1,"b":1}')
    assert not takes(grammar, '{"a":1,"c":1}')


def test_schemas_that_refer_to_each_other_are_closed_in_bounded_time():
    doubling = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    for schema in (
        {"$defs": {**doubling, "d40": A}, "$ref": "#/$defs/d0", "properties": {}},
        {"allOf": [{"$ref": "#"}, A]},
    ):
        with pytest.raises(FieldError, match=r"too often|too deeply"):
            made_grammar(lambda schema=schema: json_schema_grammar(schema, closes=True), "x")


@pytest.mark.parametrize("seed", range(60))
def test_closed_together_is_what_unevaluated_properties_say(seed):
    """By jsonschema-rs, for every object of a few names: equal without a choice, and with one no
    more than that, since each branch is closed by itself."""
    chance = random.Random(seed)
    schema, choice = random_parts(chance)
    shut = jsonschema_rs.validator_for(closed(plain_schema(schema)))
    said = jsonschema_rs.validator_for({**schema, "unevaluatedProperties": False})
    some = 0
    for values in itertools.product((None, 1, "x"), repeat=4):
        instance = {n: v for n, v in zip(("a", "b", "c", "x1"), values, strict=True) if v}
        taken = shut.is_valid(instance)
        some += taken
        assert taken <= said.is_valid(instance), (schema, instance)
        assert choice or taken == said.is_valid(instance), (schema, instance)
    assert some


def random_parts(chance):
    """A schema of several that describe one object, and whether it has a choice."""
    kinds = ({}, {"type": "integer"})
    part = lambda: {"properties": {chance.choice("abc"): chance.choice(kinds)}}  # noqa: E731
    schema = {"$defs": {"D": {**part(), "allOf": [part()]}}, **part()}
    if chance.random() < 0.6:
        schema["allOf"] = [part(), chance.choice([part(), {"$ref": "#/$defs/D"}])]
    if chance.random() < 0.3:
        schema["$ref"] = "#/$defs/D"
    if chance.random() < 0.3:
        schema["patternProperties"] = {"^x": chance.choice(kinds)}
    if choice := chance.random() < 0.4:
        schema["anyOf"] = [part(), chance.choice([{"$ref": "#/$defs/D"}, part()])]
    return schema, choice


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic", "deepseek_v31"])
@pytest.mark.parametrize("write", [calls_grammar, strict_grammar])
def test_arguments_of_tools_have_declared_names_alone(takes, form, write):  # noqa: F811
    """Also below the arguments, where tools may have other names without the option."""
    given = {"type": "object", "properties": {"p": A, "q": {"type": "null"}}, "required": ["p"]}
    tool = Tool("f", {**given, "required": ["p", "q"]}, strict=True)
    written = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"p":VALUE,"q":null}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\nVALUE\n</parameter>\n"
        "<parameter=q>\nnull\n</parameter>\n</function>\n</tool_call>",
        "pythonic": "[f(p=VALUE, q=null)]",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"p":VALUE,"q":null}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    }[form]
    for closes, value, right in (
        (False, '{"a":1,"b":2}', True),
        (True, '{"a":1,"b":2}', False),
        (True, '{"a":1}', True),
    ):
        grammar = write(form, [tool], lambda _: None, several=False, closes=closes)
        assert takes(grammar, written.replace("VALUE", value)) == right, value


def test_what_is_closed_is_left_as_it_was():
    schema = plain_schema(EXTENDED)
    before = json.dumps(schema)
    closed(schema)
    assert json.dumps(schema) == before
