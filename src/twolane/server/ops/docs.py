"""The API's description as an HTML page, without scripts or third parties."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from typing import Any

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow:auto;padding:1rem;"
    "background:#8882}h2{border-top:1px solid #8886;padding-top:1rem;font-size:1.1rem}"
    "td,th{text-align:left;vertical-align:top;padding:.1rem 1rem .1rem 0}"
    "td{overflow-wrap:anywhere}"
    ":root{color-scheme:light dark}"
)
STYLE_HASH = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
DOCS_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def described(schema: dict[str, Any]) -> str:
    """Return an OpenAPI description as a page of HTML."""
    info = schema["info"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1><p>{escape(info.get('description', ''))} "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
    ]
    for path, methods in sorted(schema["paths"].items(), key=_place):
        for method, operation in methods.items():
            parts += _operation(path, method, operation)
    for name, one in schema.get("components", {}).get("schemas", {}).items():
        parts += _object(name, one)
    return "".join(parts) + "</html>"


def _place(item: tuple[str, dict[str, Any]]) -> tuple[bool, bool]:
    """Return the place of a path: what answers prompts is before what tells of the server."""
    path, methods = item
    return not path.startswith("/v1/"), "post" not in methods


def _operation(path: str, method: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p><table>"
    for parameter in operation.get("parameters", ()):
        where = f"{parameter['name']} ({parameter['in']})"
        yield f"<tr><td><code>{escape(where)}</code><td>{_kind(parameter.get('schema', {}))}"
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield f"<tr><td>body<td>{_kind(content.get('schema', {}))}"
    for status, answer in sorted(operation.get("responses", {}).items()):
        kinds = [_kind(c.get("schema", {})) for c in answer.get("content", {}).values()]
        yield f"<tr><td>{escape(status)}<td>{escape(answer.get('description', ''))} "
        yield f"{', '.join(kinds)}"
    yield "</table>"


def _object(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>'
    yield f"<p>{escape(schema.get('description', ''))}</p>"
    fields, required = schema.get("properties", {}), schema.get("required", ())
    if not fields:
        yield f"<pre>{escape(json.dumps(schema, indent=1))}</pre>"
        return
    yield "<table>"
    for field, one in fields.items():
        needed = "required" if field in required else ""
        about = escape(one.get("description", ""))
        yield f"<tr><td><code>{escape(field)}</code><td>{_kind(one)}<td>{needed}<td>{about}"
    yield "</table>"


def _kind(schema: dict[str, Any]) -> str:
    """Return a value's type in one line, with links to the objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(map(_kind, schema[several]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return escape(", ".join(json.dumps(value) for value in values))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    shown = [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *shown]))
