"""Writes schemas as Lark rules, with objects in which every declared name can be finished.

llguidance takes the declared names of an object in their order, and other names after them, which
may begin like a declared one and must not be one. A model that writes a declared name there could
not close it. Here such an object goes on with declared and other names in any order, once it has
the required ones. Schemas without such objects are left to llguidance as a whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from twolane.common.checked_json import Json
from twolane.frontend.structured.schema import BESIDE, COUNTS, NAMED, ONE, SEVERAL, pointed

WHITESPACE = r"(\n[ \t]{0,32}| ?)"
"""White space between JSON tokens: a space, or a line end and an indentation. It is bounded: a
model that writes nothing else would never end."""
ESCAPES = 'nrbtf\\"'
"""Letters of the escapes in a schema that llguidance reads and whose objects may have other names
than those it declares. Without `u` no such name is a declared one in another spelling."""
CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
"""A control character in JSON that only `u` can write."""
TERMINALS = (
    f"JSON_OPEN: /\\{{{WHITESPACE}/",
    f"JSON_CLOSE: /{WHITESPACE}\\}}/",
    f"JSON_FIRST: /\\[{WHITESPACE}/",
    f"JSON_LAST: /{WHITESPACE}\\]/",
    f"JSON_COLON: /{WHITESPACE}:{WHITESPACE}/",
    f"JSON_COMMA: /{WHITESPACE},{WHITESPACE}/",
    r'JSON_STRING: /"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/',
)
KEYWORDS = frozenset(
    {
        *(*BESIDE, *COUNTS, *NAMED, *ONE, *SEVERAL, "const", "enum", "exclusiveMaximum"),
        *("exclusiveMinimum", "format", "maximum", "minimum", "multipleOf", "pattern"),
        *("patternProperties", "required", "type", "uniqueItems", "x-guidance"),
    }
) - (DEFINED := frozenset(("$defs", "definitions")))
"""Keywords that say which values are valid."""
OBJECT = frozenset(("additionalProperties", "properties", "required", "type"))
ARRAY = frozenset(("items", "maxItems", "minItems", "type"))
OTHER_KINDS = ("array", "boolean", "null", "number", "string")
ELSEWHERE = ('"$anchor"', '"$dynamicRef"', '"$id"')
"""Keywords by which references are not places in the schema."""


def json_expression(schema: Json, rules: list[str]) -> str:
    """Return a Lark expression of the JSON values that a schema allows.

    Args:
        schema: the schema, from `plain_schema`.
        rules: the rules of the grammar, to which those of the expression are added.

    Raises:
        ValueError: a number in the schema has no form in JSON.
    """
    text = json.dumps(schema, allow_nan=False)
    writer = _Writer(schema, rules)
    if any(word in text for word in ELSEWHERE) or not writer.reaches(_is_open):
        return writer.leaf(schema)
    rules += [terminal for terminal in TERMINALS if terminal not in rules]
    return writer.value(schema)


class _Writer:
    """Writes the rules of one schema."""

    def __init__(self, root: Json, rules: list[str]) -> None:
        self._root, self._rules = root, rules
        self._known: dict[object, str] = {}
        """Rules by the identity of a schema, or by the JSON of one that is left to llguidance."""
        self._nodes: dict[int, Mapping[str, Any]] = {}
        """All schemas that are read here, by identity."""
        todo: list[Any] = [root]
        while todo:
            node = todo.pop()
            if isinstance(node, Mapping) and id(node) not in self._nodes:
                self._nodes[id(node)] = node
                todo += self._parts(node)

    def reaches(self, wanted: Any) -> bool:
        """Return whether the schema has a part that `wanted` says yes to."""
        return any(map(wanted, self._nodes.values()))

    def _parts(self, schema: Mapping[str, Any]) -> Sequence[Any]:
        if _is_reference(schema):
            target = pointed(self._root, schema["$ref"])
            return [target] if isinstance(target, Mapping | bool) else []
        if _is_choice(schema):
            return list(schema["anyOf"])
        if _is_array(schema):
            return [schema["items"]]
        if _is_object(schema):
            return [*(value for _, value, _ in _names(schema)), _others(schema)]
        return []

    def value(self, schema: Any) -> str:
        """Return the expression of a schema's values."""
        if not isinstance(schema, Mapping) or not self._parts(schema):
            return self.leaf(schema)
        if id(schema) not in self._known:
            place, name = len(self._rules), f"json_{len(self._rules)}"
            self._known[id(schema)] = name
            self._rules.append("")
            self._rules[place] = f"{name}: {self._written(schema)}"
        return self._known[id(schema)]

    def leaf(self, schema: Any) -> str:
        """Return the expression of values that llguidance reads in a schema."""
        whole = {"not": {}} if schema is False else {} if schema is True else schema
        if "$ref" in json.dumps(whole):
            whole = {**{name: self._root[name] for name in DEFINED & self._root.keys()}, **whole}
        options = {"whitespace_pattern": WHITESPACE}
        if has_other_names(whole):
            options["json_allowed_escapes"] = ESCAPES
            if CONTROL.search(json.dumps(whole)):
                raise ValueError("control characters beside other names than declared ones")
        text = "%json " + json.dumps({**whole, "x-guidance": options})
        if text not in self._known:
            self._known[text] = self._rule(text)
        return self._known[text]

    def _written(self, schema: Mapping[str, Any]) -> str:
        if _is_reference(schema):
            return self.value(pointed(self._root, schema["$ref"]))
        if _is_choice(schema):
            options = [each for each in schema["anyOf"] if each is not False]
            return " | ".join(map(self.value, options)) or self.leaf(False)
        if _is_array(schema):
            return self._array(schema)
        kinds = schema.get("type", OTHER_KINDS)
        others = [] if kinds == "object" else [kind for kind in kinds if kind != "object"]
        found = self._object(schema)
        return f"{found} | {self.leaf({'type': others})}" if others else found

    def _array(self, schema: Mapping[str, Any]) -> str:
        item, least, most = self.value(schema["items"]), schema.get("minItems", 0), ""
        if "maxItems" in schema:
            most = str(schema["maxItems"] - 1)
        more = f"(JSON_COMMA {item}){{{max(least - 1, 0)},{most}}}"
        return f"JSON_FIRST ({item} {more}){'' if least else '?'} JSON_LAST"

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of an object: its names in order, then in any order.

        Raises:
            ValueError: a required property can have no value.
        """
        names, other = _names(schema), _others(schema)
        for name, value, needed in names:
            if value is False and needed:
                raise ValueError(f"the property {name[:80]!r} is required and can have no value")
        pairs = [
            (self._rule(f"{_quoted(name)} JSON_COLON {self.value(value)}"), needed)
            for name, value, needed in names
            if value is not False
        ]
        if other is False:
            return f"JSON_OPEN {self._in_order(pairs)} JSON_CLOSE"
        taken = " | ".join(_quoted(name) for name, _, _ in names)
        another = self._terminal(f"JSON_STRING & ~({taken})" if taken else "JSON_STRING")
        another = self._rule(f"{another} JSON_COLON {self.value(other)}")
        one = self._rule(" | ".join([*(pair for pair, _ in pairs), another]))
        more = self._rule(f"(JSON_COMMA {one})*")
        last = max((place for place, (_, needed) in enumerate(pairs, 1) if needed), default=0)
        begun = self._in_order(pairs[:last])
        inside = f"{begun} {more}" if begun else f"({one} {more})?"
        return f"JSON_OPEN {inside} JSON_CLOSE"

    def _in_order(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Return the expression of some pairs in their order, given with whether each is needed."""
        first = rest = ""
        for pair, needed in reversed(pairs):
            begun = f"{pair} {rest}"
            optional = f"{begun} | {first}" if first else f"({begun})?"
            first = self._rule(begun if needed else optional)
            rest = self._rule(f"(JSON_COMMA {pair}){'' if needed else '?'} {rest}")
        return first

    def _rule(self, written: str) -> str:
        self._rules.append(f"json_{len(self._rules)}: {written}")
        return f"json_{len(self._rules) - 1}"

    def _terminal(self, written: str) -> str:
        self._rules.append(f"JSON_{len(self._rules)}: {written}")
        return f"JSON_{len(self._rules) - 1}"


def has_other_names(schema: Any) -> bool:
    """Return whether an object may have other names beside declared ones or patterns of them."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, Mapping):
            named = part.keys() & {"patternProperties", "properties", "required"}
            if named and _others(part) is not False:
                return True
            todo += part.values()
    return False


def _words(schema: Mapping[str, Any]) -> set[str]:
    return schema.keys() & KEYWORDS


def _is_reference(schema: Mapping[str, Any]) -> bool:
    return _words(schema) == {"$ref"} and isinstance(schema["$ref"], str)


def _is_choice(schema: Mapping[str, Any]) -> bool:
    return _words(schema) == {"anyOf"} and isinstance(schema["anyOf"], list)


def _is_array(schema: Mapping[str, Any]) -> bool:
    least = schema.get("minItems", 0)
    most = schema.get("maxItems", max(least, 1) if type(least) is int else None)
    if not (_words(schema) <= ARRAY and type(least) is type(most) is int):
        return False
    items, typed = schema.get("items"), schema.get("type") == "array"
    return typed and isinstance(items, Mapping) and most >= max(least, 1)


def _is_object(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema has declared names and no more than `OBJECT`'s keywords."""
    kinds, required = schema.get("type", ["object"]), schema.get("required", [])
    if not (_words(schema) <= OBJECT and isinstance(kinds, str | list) and "object" in kinds):
        return False
    whole = isinstance(schema.get("properties", {}), Mapping) and isinstance(required, list)
    return whole and all(isinstance(name, str) for name in required) and bool(_names(schema))


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Return whether an object may have other names than those it declares."""
    return _is_object(schema) and _others(schema) is not False


def _names(schema: Mapping[str, Any]) -> Sequence[tuple[str, Any, bool]]:
    """Return the declared names of an object, with schema and whether it is required."""
    required = dict.fromkeys(schema.get("required", ()), True)
    known = schema.get("properties", {})
    more = {name: _others(schema) for name in required if name not in known}
    return [(name, value, name in required) for name, value in {**known, **more}.items()]


def _others(schema: Mapping[str, Any]) -> Any:
    """Return the schema of an object's other values; False: it has none."""
    return schema.get("additionalProperties", True)


def _quoted(name: str) -> str:
    """Return the Lark string of a name in JSON."""
    return json.dumps(json.dumps(name, ensure_ascii=False))
