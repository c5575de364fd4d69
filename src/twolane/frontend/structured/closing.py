"""Closes the objects of JSON schemas that do not say which other names an object may have.

JSON Schema lets such an object have any other names, and a small model goes on writing them. Each
object that declares names gets `additionalProperties: false`, as by vLLM's option
`disable_additional_properties`; schemas that describe one value together (`allOf`, and what stands
beside `$ref`, `anyOf` and `oneOf`) are closed together, so that none forbids the others' names.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from twolane.common.checked_json import Json
from twolane.frontend.structured.objects import DEFINED, KEYWORDS
from twolane.frontend.structured.schema import pointed

SAID = frozenset(("additionalProperties", "const", "enum", "unevaluatedProperties"))
"""Keywords by which a schema says itself which other names an object may have."""
VALUES = frozenset(("additionalItems", "additionalProperties", "items", "prefixItems"))
"""Keywords with a schema, or several, of values inside the value."""
NAMED_VALUES = frozenset(("patternProperties", "properties")) | DEFINED
"""Keywords with schemas of other values by name."""
CHOICES = ("anyOf", "oneOf")
MAX_LOOKS = 1 << 16
"""Most visits of schemas, in 1 to 10 µs each: references may multiply what is small."""


class _Declared(NamedTuple):
    """The names that an object may have by schemas that describe it together."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    declared: bool = False
    """Whether a schema declares names."""
    free: bool = False
    """Whether a schema allows other names by its own words, or cannot be found."""

    def with_those_of(self, other: "_Declared") -> "_Declared":
        return _Declared(
            self.names + other.names,
            self.patterns + other.patterns,
            self.declared or other.declared,
            self.free or other.free,
        )


NOTHING = _Declared()


def closed(schema: Json) -> Json:
    """Return a schema, from `plain_schema`, whose objects have declared names only.

    An object that declares none, or says itself which others it has, stays as it is.

    Raises:
        ValueError: its schemas refer to each other too often.
    """
    closer = _Closer(schema)
    made: Json = closer.closed(schema)
    if closer.opened:
        made["$defs"] = {**made.get("$defs", {}), **closer.opened}
    return made


class _Closer:
    """Closes one schema."""

    def __init__(self, root: Json) -> None:
        self._root, self._looks = root, MAX_LOOKS
        self.opened: Json = {}
        """Open copies of what is referred to where several schemas are closed together."""
        self._known: dict[int, str] = {}
        """References to open copies by the identity of the original."""

    def closed(self, schema: Any, around: _Declared = NOTHING) -> Any:
        """Return a schema that is closed together with those that stand around it."""
        if not isinstance(schema, Mapping):
            return schema
        made, words = self._with_closed_values(schema), schema.keys() & KEYWORDS
        if words & SAID or around.free:
            return self._with_open_parts(made)
        if not around.declared and words == {"$ref"}:
            return made
        if not around.declared and words == {"allOf"} and len(schema["allOf"]) == 1:
            return {**made, "allOf": [self.closed(schema["allOf"][0])]}
        choice = next((word for word in CHOICES if isinstance(schema.get(word), list)), None)
        names = around.with_those_of(self._names(schema, without=choice))
        made = self._with_open_parts(made, without=choice)
        if choice is not None:
            branches = ({} if branch is True else branch for branch in schema[choice])
            return {**made, choice: [self.closed(branch, names) for branch in branches]}
        if names.free or not names.declared:
            return made
        for word, found in (("properties", names.names), ("patternProperties", names.patterns)):
            if found:
                made[word] = {**dict.fromkeys(found, True), **made.get(word, {})}
        return {**made, "additionalProperties": False}

    def _with_closed_values(self, schema: Mapping[str, Any]) -> Json:
        """Return a copy of a schema, in which the values inside the value are closed."""
        self._look()
        made: Json = {}
        for word, value in schema.items():
            if word in NAMED_VALUES and isinstance(value, Mapping):
                made[word] = {name: self.closed(each) for name, each in value.items()}
            elif word in VALUES and isinstance(value, list):
                made[word] = [self.closed(each) for each in value]
            else:
                made[word] = self.closed(value) if word in VALUES else value
        return made

    def _with_open_parts(self, made: Json, without: str | None = None) -> Json:
        """Return a schema whose schemas of the same value, but the choice `without`, are open."""
        for word in ("allOf", *CHOICES):
            if word != without and isinstance(made.get(word), list):
                made[word] = [self._open(part) for part in made[word]]
        if isinstance(reference := made.get("$ref"), str):
            made["$ref"] = self._open_reference(reference)
        return made

    def _open(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        return self._with_open_parts(self._with_closed_values(schema))

    def _open_reference(self, reference: str) -> str:
        """Return a reference to an open copy of what one refers to."""
        target = pointed(self._root, reference)
        if not isinstance(target, Mapping):
            return reference
        if id(target) not in self._known:
            name = f"open {len(self._known)}"
            while name in self._root.get("$defs", {}):
                name += "'"
            self._known[id(target)] = "#/$defs/" + name.replace(" ", "%20")
            own = {word: value for word, value in target.items() if word not in DEFINED}
            self.opened[name] = self._open(own)
        return self._known[id(target)]

    def _names(self, schema: Any, without: str | None = None) -> _Declared:
        """Return the names by a schema and those of the same value, but the choice `without`."""
        self._look()
        if not isinstance(schema, Mapping):
            return NOTHING
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        required = schema.get("required")
        names = [*(properties or ()), *(required if isinstance(required, list) else ())]
        found = _Declared(
            tuple(dict.fromkeys(name for name in names if isinstance(name, str))),
            tuple(patterns or ()),
            properties is not None or patterns is not None,
            any(schema[word] is not False for word in SAID & schema.keys()),
        )
        for part in self._parts(schema, without):
            found = found.with_those_of(self._names(part))
        return found

    def _parts(self, schema: Mapping[str, Any], without: str | None) -> Iterator[Any]:
        """Yield the schemas inside one that describe the same value, but the choice `without`."""
        for word in ("allOf", *CHOICES):
            if word != without and isinstance(schema.get(word), list):
                yield from schema[word]
        if isinstance(reference := schema.get("$ref"), str):
            target = pointed(self._root, reference)
            yield {"additionalProperties": True} if target is None else target

    def _look(self) -> None:
        self._looks -= 1
        if self._looks < 0:
            raise ValueError("its schemas refer to each other too often to be closed")
