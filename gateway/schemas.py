"""JSON schemas that the workers' compiler takes and then does not follow: refused, with their place.

Each keyword is read as that compiler reads it. What it refuses by itself is not repeated here; what it does not enforce
(docs/api.md says which) is not looked into.
"""

import json
from collections.abc import Iterator
from typing import Any

from mesh.errors import InvalidRequest

# Keywords that hold one schema, several in a list, several by name.
_ONE = ("additionalProperties", "items", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTED = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")

MOST_CHARACTERS = 200  # of a place or a value that goes back to the client

Types = frozenset[str]
Schema = dict[str, Any]


def check_schema(text: str) -> None:
    """`text` is JSON. Raises InvalidRequest that names the place, as a JSON pointer, of what cannot be followed."""
    for place, schema in _schemas("#", json.loads(text)):
        if problem := _reference(schema) or _values(schema) or _required(schema) or _all_of(schema):
            message = f"at {place[:MOST_CHARACTERS]}: {problem}"
            raise InvalidRequest(message.encode("utf-8", "replace").decode(), field="json_schema")


def _schemas(place: str, schema: Any) -> Iterator[tuple[str, Schema]]:
    """Every schema in `schema` with its place, itself first."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for keyword in _ONE:
        yield from _schemas(f"{place}/{keyword}", schema.get(keyword))
    for keyword in _LISTED:
        for index, inner in enumerate(_list(schema, keyword)):
            if keyword != "allOf" or len(schema["allOf"]) == 1:  # several are not enforced
                yield from _schemas(f"{place}/{keyword}/{index}", inner)
    for keyword in _NAMED:
        named = schema.get(keyword)
        for name, inner in (named if isinstance(named, dict) else {}).items():
            yield from _schemas(f"{place}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}", inner)


def _list(schema: Schema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _reference(schema: Schema) -> str:
    for keyword in ("$dynamicRef", "$recursiveRef"):
        if keyword in schema:
            return f"{keyword} cannot be followed; use $ref with a place in this schema, as #/$defs/name"
    target = schema.get("$ref", "#")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        return ""
    return f"$ref {_said(target)} cannot be followed: only a place in this schema can, as #/$defs/name"


def _values(schema: Schema) -> str:
    """const and enum alone decide what is said: something of them must have the schema's type."""
    types, enum = _types(schema), _list(schema, "enum")
    keyword = "const" if "const" in schema else "enum"
    values = [schema["const"]] if "const" in schema else enum
    if values and types is not None and not any(_types_of(value) & types for value in values):
        return f"{keyword} {_said(schema[keyword])} has nothing of type {_named(types)}"
    if keyword == "const" and enum and not any(_equal(schema["const"], value) for value in enum):
        return f"const {_said(schema['const'])} is not in enum"
    return ""


def _required(schema: Schema) -> str:
    """Only a property that is named is ever made sure of, even where others may come."""
    named = schema.get("properties")
    if not isinstance(named, dict) and "object" not in (_types(schema) or ()):
        return ""
    missing = [name for name in _list(schema, "required") if isinstance(name, str) and name not in (named or {})]
    return f"required {_said(missing[0])} is not among the properties; give it a schema there" if missing else ""


def _all_of(schema: Schema) -> str:
    """Of several, only that they leave a type."""
    left: Types | None = _types(schema)
    for part in _list(schema, "allOf"):
        types = _types(part) if isinstance(part, dict) else None
        if types is None:
            continue
        if left is not None and not left & types:
            return f"allOf: nothing is of type {_named(left)} and of type {_named(types)}"
        left = types if left is None else left & types
    return ""


def _types(schema: Schema) -> Types | None:
    """The types that it allows, where it names any."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return frozenset(names) | ({"integer"} if "number" in names else frozenset())


def _types_of(value: Any) -> Types:
    """The types that a JSON value has. 5.0 is an integer, too."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int() | float():
            return frozenset({"number", "integer"} if value == value // 1 else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _equal(one: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0, and not true."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _named(types: Types) -> str:
    return " or ".join(sorted(types - {"integer"} if "number" in types else types))


def _said(value: Any) -> str:
    return json.dumps(value)[:MOST_CHARACTERS]
