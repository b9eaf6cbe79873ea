"""Schemas that could not be followed are refused with their place; their near misses are not."""

import json

import pytest

from gateway.schemas import MOST_CHARACTERS, check_schema
from mesh.errors import InvalidRequest

NAMED = {"type": "object", "properties": {"x": {}}, "required": ["x"]}

# schema, place, what the refusal speaks of
REFUSED = [
    ({"type": "object", "properties": {}, "required": ["x"], "additionalProperties": False}, "#", 'required "x"'),
    ({"type": "object", "required": ["x"]}, "#", 'required "x"'),
    ({"properties": {"y": {}}, "required": ["y", "x"], "additionalProperties": True}, "#", 'required "x"'),
    ({"type": ["object", "null"], "patternProperties": {"^x": {}}, "required": ["x"]}, "#", 'required "x"'),
    ({"type": "string", "const": 5}, "#", "const 5"),
    ({"type": "string", "enum": [5, None]}, "#", "enum [5, null]"),
    ({"type": "integer", "const": 1.5}, "#", "const 1.5"),
    ({"type": "integer", "const": True}, "#", "const true"),
    ({"type": ["string", "null"], "const": {}}, "#", "null or string"),
    ({"const": 1, "enum": [2, True]}, "#", "const 1 is not in enum"),
    ({"$ref": "http://127.0.0.1:1/x"}, "#", '$ref "http://127.0.0.1:1/x"'),
    ({"$ref": "other.json#/x"}, "#", "$ref"),
    ({"$ref": "#anchor"}, "#", "$ref"),
    ({"$ref": 5}, "#", "$ref 5"),
    ({"$dynamicRef": "#/x"}, "#", "$dynamicRef"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#", "allOf"),
    ({"type": "string", "allOf": [{"type": "integer"}]}, "#", "allOf"),
    ({"allOf": [{"type": ["string", "null"]}, {"minLength": 1}, {"type": "null"}, {"type": "string"}]}, "#", "allOf"),
    (
        {"properties": {"a/b~c": {"items": {"anyOf": [{}, {"$ref": "x"}]}}}},
        "#/properties/a~1b~0c/items/anyOf/1",
        "$ref",
    ),
    ({"$defs": {"d": {"prefixItems": [{"allOf": [{"$ref": "x"}]}]}}}, "#/$defs/d/prefixItems/0/allOf/0", "$ref"),
]

ACCEPTED = [
    True,
    NAMED,
    {"type": "object", "properties": {"x": {}}},
    {"required": ["x"]},
    {"type": "string", "required": ["x"]},
    {"type": "string", "const": "5"},
    {"type": "string", "enum": [5, "a"]},
    {"type": "number", "const": 5},
    {"type": "integer", "const": 5.0},
    {"type": ["string", "null"], "const": None},
    {"type": "boolean", "enum": [True]},
    {"const": 1, "enum": [1.0]},
    {"const": {"$ref": "http://x"}},
    {"default": {"$ref": "http://x"}, "enum": [{"$ref": "http://x"}]},
    {"properties": {"$ref": {"type": "string"}, "const": {"type": "null"}, "enum": {}}, "type": "object"},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": NAMED}},
    {"allOf": [{"type": "number"}, {"type": "integer"}]},
    {"allOf": [{"type": ["string", "null"]}, {"type": "string"}, {"maxLength": 3}]},
    {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object", "required": ["b"]}], "$defs": {"a": NAMED}},
    {"not": {"type": "string", "const": 5}},
    {"type": 5, "enum": "no list", "required": 7, "properties": [], "allOf": {}, "items": 3},
]


@pytest.mark.parametrize(("schema", "place", "says"), REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_place(schema, place, says):
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.field == "json_schema"
    assert caught.value.message.startswith(f"at {place}: ")
    assert says in caught.value.message


@pytest.mark.parametrize("schema", ACCEPTED)
def test_what_may_be_said_is_accepted(schema):
    check_schema(json.dumps(schema))


def test_a_refusal_is_short_text_whatever_the_schema_holds():
    with pytest.raises(InvalidRequest) as caught:
        check_schema(json.dumps({"properties": {"\ud800" + "x" * 9000: {"$ref": "\ud800" + "y" * 9000}}}))
    assert len(caught.value.message.encode()) < 3 * MOST_CHARACTERS
