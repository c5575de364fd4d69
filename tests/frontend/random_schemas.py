"""Random JSON schemas of what `docs/guides/agents.md` promises to enforce."""

import random
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "kind", "size", "id", "tags", "a b", "ü", "")


def random_schema(chance: random.Random, depth: int = 3) -> Schema:
    """Return a schema, nested at most `depth` deep."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += ["object", "object", "array", "anyOf", "ref"] if depth else []
    return globals()[f"_{chance.choice(kinds)}"](chance, depth)


def _string(chance: random.Random, _: int) -> Schema:
    form = chance.choice(["any", "length", "pattern", "format"])
    if form == "length":
        least = chance.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(6)}
    if form == "pattern":
        return {"type": "string", "pattern": chance.choice(["^[a-z]{2,4}$", "^x+y?$", "^[0-9]-$"])}
    if form == "format":
        return {"type": "string", "format": chance.choice(["date", "uuid", "ipv4", "email"])}
    return {"type": "string"}


def _integer(chance: random.Random, _: int) -> Schema:
    least = chance.randrange(-50, 50)
    bounds = [{}, {"minimum": least}, {"minimum": least, "maximum": least + chance.randrange(90)}]
    return {"type": "integer", **chance.choice(bounds)}


def _number(chance: random.Random, _: int) -> Schema:
    least = chance.randrange(-50, 50) / 4
    bounds = [{}, {"exclusiveMinimum": least}, {"minimum": least, "maximum": least + 3.5}]
    return {"type": "number", **chance.choice(bounds)}


def _boolean(chance: random.Random, _: int) -> Schema:
    return {"type": "boolean"}


def _null(chance: random.Random, _: int) -> Schema:
    return {"type": chance.choice(["null", ["null", "integer"]])}


def _enum(chance: random.Random, _: int) -> Schema:
    values = [1, -2.5, None, True, "x", 'quoted "y"', "ü\n", [1], {"a": 1}]
    return {"enum": chance.sample(values, chance.randrange(1, 5))}


def _const(chance: random.Random, _: int) -> Schema:
    return {"const": chance.choice([0, "c", None, [], {"k": [1, "2"]}])}


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(WORDS, chance.randrange(4))
    schema: Schema = {
        "type": "object",
        "properties": {name: random_schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
    }
    more = chance.choice([False, False, None, {"type": "integer"}])
    return schema if more is None else {**schema, "additionalProperties": more}


def _array(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.3:
        first = [random_schema(chance, depth - 1) for _ in range(chance.randrange(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    least = chance.randrange(3)
    bounds = {"minItems": least, "maxItems": least + chance.randrange(3)}
    return {"type": "array", "items": random_schema(chance, depth - 1), **bounds}


def _anyOf(chance: random.Random, depth: int) -> Schema:  # the keyword
    return {"anyOf": [random_schema(chance, depth - 1) for _ in range(chance.randrange(1, 4))]}


def _ref(chance: random.Random, depth: int) -> Schema:
    """A list that is nested in itself, by a reference of its own name."""
    name = f"node{chance.randrange(10**9)}"
    node = {
        "type": "object",
        "properties": {"value": random_schema(chance, 0), "next": {"$ref": f"#/$defs/{name}"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": f"#/$defs/{name}", "$defs": {name: node}}


def rooted(schema: Schema) -> Schema:
    """Return the schema with all definitions at its root, where references look for them."""
    found: Schema = {}

    def lift(part: Any) -> Any:
        if isinstance(part, list):
            return [lift(each) for each in part]
        if not isinstance(part, dict):
            return part
        if isinstance(part.get("$defs"), dict):
            found.update({key: lift(each) for key, each in part["$defs"].items()})
        return {key: lift(each) for key, each in part.items() if key != "$defs"}

    root = lift(schema)
    return {**root, "$defs": found} if found else root
