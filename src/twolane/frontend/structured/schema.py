"""Rewrites JSON schemas with keywords that llguidance supports.

Generators of schemas write keywords that say nothing, and others for which there are plainer ones.
What is left is llguidance's to refuse by name.
"""

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from twolane.common.checked_json import Json
from twolane.frontend.structured.ecma import rust_regex
from twolane.frontend.structured.patterns import EQUAL, as_whole, without_look_ahead

ONE = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
"""Keywords with a schema; `items` may also have several."""
SEVERAL = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords with a list of schemas."""
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "properties"})
"""Keywords with schemas by name."""
COUNTS = frozenset(
    {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
)
"""Keywords with an integer, which JSON may write as 8.0."""
EMPTY = frozenset({"dependencies", "dependentRequired", "dependentSchemas", "patternProperties"})
"""Keywords without effect if empty."""
BESIDE = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas"),
        *("else", "if", "not", "oneOf", "then"),
    }
)
"""Keywords with schemas that evaluate the same properties or items."""
UNEVALUATED = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}
"""Keywords by which one stands for them where nothing else evaluates the same value."""
OF_CONTAINS = frozenset({"maxContains", "minContains"})
"""Keywords without effect without `contains`."""
ANNOTATIONS = frozenset(
    {
        *("$comment", "default", "deprecated", "description", "examples", "readOnly", "title"),
        "writeOnly",
    }
)
"""Keywords without effect on validity."""
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname"),
        *("ipv4", "ipv6", "iri", "iri-reference", "json-pointer", "regex", "uri"),
        *("relative-json-pointer", "time", "uri-reference", "uri-template", "uuid"),
    }
)
"""Formats that JSON Schema defines; any other is an annotation and never an error."""
DATE = (
    r"(?:(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
    r"-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
MOMENTS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[Tt]{TIME}$"}
"""Patterns of formats for which llguidance accepts dates that do not exist, such as February 29 of
every year. Leap seconds and the year 0 are left out: most programs read neither."""
ONE_NAME = re.compile(r"\^([\w -]+)\$")
"""A pattern that matches one name alone."""
DIALECT = re.compile(
    r"https?://json-schema\.org/(?:draft-(0[3467])|draft/(2019-09|2020-12))/(?:hyper-)?schema#?"
)
"""Dialects that llguidance distinguishes."""
LOOSE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
MAX_STEPS, MAX_POINTER_LENGTH = 8, 256
"""Most steps of a chain of references, and most characters of a reference."""
MAX_LOOKS = 8192
"""Most schemas and listed values that a `KindFinder` visits, in 1 to 30 µs each."""


def plain_schema(schema: object) -> Json:
    """Return an equivalent schema with only keywords that llguidance supports.

    Raises:
        ValueError: it allows no value, is no schema, or has a pattern that `rust_regex` refuses.
    """
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise ValueError(f"a schema is an object, not {schema!r}"[:100])
    plain: Json | Literal[False] = _plain(schema, schema)
    if plain is False:
        raise ValueError("the schema allows no value")
    return plain


def text_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Return regular expressions of Rust's that a text which fits a schema matches as a whole:
    those of its patterns, of formats that patterns stand for, and of its length.

    Raises:
        ValueError: see `plain_schema`; or a pattern has anchors in alternatives.
    """
    plain = plain_schema(schema)
    parts = (plain, *plain.get("allOf", ()))
    found = [as_whole(part["pattern"]) for part in parts if "pattern" in part]
    if plain.keys() & {"minLength", "maxLength"}:
        found.append(_of_length(plain).strip("^$"))
    return found


def with_objects_only(schema: Mapping[str, Any]) -> Json:
    """Return a tool's schema with its type set to object, also where it does not state it."""
    return {**schema, "type": "object"} if schema.get("type") is None else dict(schema)


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a local reference; a schema that is none unchanged."""
    for _ in range(MAX_STEPS):
        if not isinstance(schema, Mapping):
            break
        inherited = schema.get("allOf")
        if isinstance(inherited, list) and len(inherited) == 1 and "type" not in schema:
            schema = inherited[0]
        elif isinstance(schema.get("$ref"), str):
            schema = pointed(root, schema["$ref"])
        else:
            break
    return schema


def pointed(root: Any, reference: str) -> Any:
    """Return the part of a document at a JSON pointer (RFC 6901); None: there is none."""
    if reference == "#":
        return root
    if not reference.startswith("#/") or len(reference) > MAX_POINTER_LENGTH:
        return None
    part = root
    for step in urllib.parse.unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _plain(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    schema = _with_named_patterns(schema)
    plain = {name: _value(name, value, root) for name, value in schema.items()}
    plain = {name: value for name, value in plain.items() if not _says_nothing(name, value)}
    if plain.keys() - ANNOTATIONS == {"not"} and _allows_all(plain["not"]):
        return False  # Zod's z.never()
    if not plain.keys() & BESIDE:
        plain = _evaluated_here(plain)
    if "contains" not in plain:
        plain = {name: value for name, value in plain.items() if name not in OF_CONTAINS}
    if isinstance(form := plain.get("format"), str) and form in MOMENTS:
        plain = _also_matching(plain, MOMENTS[form])
    if isinstance(pattern := plain.get("pattern"), str):
        first, *more = map(rust_regex, without_look_ahead(pattern))
        plain["pattern"] = first
        for each in more:
            plain = _also_matching(plain, each)
    names = plain.pop("propertyNames", None)
    return plain if names is None else _with_names(plain, names, root)


def _with_named_patterns(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with the patterns of names that match one name alone as that property.

    After a declared name, a pattern for it alone would let an object go on and not end. A name that
    is neither declared nor required stays a pattern where the number of properties is bounded:
    llguidance counts only required ones.
    """
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    if not isinstance(patterns, Mapping) or not isinstance(properties, Mapping):
        return schema
    required = schema.get("required")
    known = [*properties, *(required if isinstance(required, list) else ())]
    bounded = not schema.keys().isdisjoint({"minProperties", "maxProperties"})
    named = {
        pattern: match[1]
        for pattern in patterns
        if (match := ONE_NAME.fullmatch(pattern)) and (match[1] in known or not bounded)
    }
    both = dict(properties)
    for pattern, name in named.items():
        value = patterns[pattern]
        both[name] = {"allOf": [both[name], value]} if name in both else value
    rest = {pattern: value for pattern, value in patterns.items() if pattern not in named}
    return {**schema, "properties": both, "patternProperties": rest} if named else schema


def _evaluated_here(schema: Json) -> Json:
    """Return a schema whose properties and items no other schema evaluates, with the older words
    for the rest of them."""
    plain = dict(schema)
    for new, old in UNEVALUATED.items():
        if new in plain and not isinstance(plain.get(old), list):
            plain.setdefault(old, plain[new])
            del plain[new]
    return plain


def _also_matching(schema: Json, pattern: str) -> Json:
    """Return the schema with one more pattern, which stands for its format if it has one."""
    others = {name: value for name, value in schema.items() if name != "format"}
    if "pattern" not in others:
        return {**others, "pattern": pattern}
    more = others.get("allOf", [])
    return {**others, "allOf": [*more, {"pattern": pattern}]} if isinstance(more, list) else schema


def _value(name: str, value: Any, root: Mapping[str, Any]) -> Any:
    if name == "patternProperties" and isinstance(value, Mapping):
        return {rust_regex(key): _plain(each, root) for key, each in value.items()}
    if name in NAMED and isinstance(value, Mapping):
        return {key: _plain(each, root) for key, each in value.items()}
    if name in SEVERAL and isinstance(value, list):
        return [_plain(each, root) for each in value]
    if name in ONE:
        return _plain(value, root)
    if name in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name in ("$ref", "$id") and isinstance(value, str):
        # Characters of a reference besides letters and digits.
        return urllib.parse.quote(LOOSE_PERCENT.sub("%25", value), safe="!#$%&'()*+,-./:;=?@_~")
    if name == "$schema":
        return _dialect(value)
    if name == "pattern" and isinstance(value, str):
        return EQUAL.get(value, value)
    return value


def _dialect(uri: object) -> str | None:
    """Return llguidance's name of a dialect; None: it is another, or the default."""
    match = DIALECT.fullmatch(uri) if isinstance(uri, str) else None
    if match is None:
        return None
    old, new = match.groups()
    if old is None:
        return f"https://json-schema.org/draft/{new}/schema"
    return f"http://json-schema.org/draft-{old}/schema#"


def _says_nothing(name: str, value: Any) -> bool:
    match name:
        case "not" | "uniqueItems":
            return value is False or value is None
        case "unevaluatedItems" | "unevaluatedProperties":
            return value is None or _allows_all(value)
        case "propertyNames":
            return value is None or _allows_all(value, kind="string")
        case "format":
            return value is None or (isinstance(value, str) and value not in FORMATS)
        case _ if name in EMPTY:
            return not value
    # Keywords whose null is kept; elsewhere generators write null for a missing value.
    return value is None and name not in {"const", "default", "type"}


def _allows_all(schema: object, kind: str | None = None) -> bool:
    """Return whether a schema allows every value, or every value of a type."""
    if not isinstance(schema, Mapping):
        return schema is True
    return schema.get("type", kind) == kind and not schema.keys() - ANNOTATIONS - {"type"}


def _with_names(schema: Json, names: Any, root: Mapping[str, Any]) -> Json:
    """Return a schema of objects with constrained property names, without `propertyNames` where
    possible."""
    known = resolved(names, root)
    if not isinstance(known, Mapping) or schema.keys() & {"patternProperties", "properties"}:
        return {**schema, "propertyNames": names}
    value = schema.get("additionalProperties", {})
    match {key: known[key] for key in known.keys() - ANNOTATIONS - {"type"}}:
        case {"enum": [*allowed], **others} if not others:
            keywords: Json = {"properties": {n: value for n in allowed if isinstance(n, str)}}
        case {"const": str(only), **others} if not others:
            keywords = {"properties": {only: value}}
        case {"pattern": str(pattern), **others} if not others:
            keywords = {"patternProperties": {rust_regex(pattern): value}}
        case {"minLength": _} | {"maxLength": _} as lengths if not _unknown_lengths(lengths):
            keywords = {"patternProperties": {_of_length(lengths): value}}
        case _:
            return {**schema, "propertyNames": names}
    return {**schema, **keywords, "additionalProperties": False}


def _unknown_lengths(lengths: Mapping[str, Any]) -> bool:
    known = {"minLength", "maxLength"}
    return bool(lengths.keys() - known) or not all(type(n) is int for n in lengths.values())


def _of_length(lengths: Mapping[str, int]) -> str:
    least, most = lengths.get("minLength", 0), lengths.get("maxLength", "")
    return rf"^[\s\S]{{{least},{most}}}$"


class KindFinder:
    """Finds the JSON types that schemas name.

    A client can have a few schemas refer to each other so often that a look at each takes for ever;
    so all of a finder's schemas together have a bounded number of looks.
    """

    def __init__(self) -> None:
        self._looks = MAX_LOOKS

    def kinds_of(self, schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
        """Return the types that a schema names; empty: it names none, or not in all branches, or
        too many were visited."""
        kinds: set[str] = set()
        seen: set[int] = set()
        parts = [schema]
        while parts:
            part = resolved(parts.pop(), root)
            if not isinstance(part, Mapping):
                return frozenset()
            if id(part) in seen:
                continue
            seen.add(id(part))
            named, branches = _named_kinds(part), part.get("anyOf", part.get("oneOf"))
            self._looks -= 1 + len(values_of(part) or ())
            if self._looks < 0 or not (named or (isinstance(branches, list) and branches)):
                return frozenset()
            kinds |= named
            parts += () if named else branches
        return frozenset(kinds)


def _named_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema names directly."""
    types = schema.get("type")
    if types is not None:
        listed = types if isinstance(types, list) else [types]
        return frozenset(kind for kind in listed if isinstance(kind, str))
    return frozenset(KINDS[type(value)] for value in values_of(schema) or ())


def values_of(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a schema enumerates; None: it enumerates none."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


KINDS: Mapping[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{dict: "object", list: "array", type(None): "null"},
}
"""JSON types by Python type."""
