"""The structure that an answer must have, by OpenAI's name (`response_format`) and by vLLM's (`structured_outputs`).

Read here, checked in mesh/sampling.py, compiled by the worker; a refusal from either gets the caller's name back.
"""

from typing import Any, Literal

import msgspec

from mesh.errors import InvalidRequest, ShoalError
from mesh.sampling import Structure

ANY_OBJECT = '{"type":"object"}'


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's wrapping. All but the schema is bookkeeping; `strict` or not, the answer follows it."""

    name: str = ""
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One of them. `json` is a schema, as JSON or as its text."""

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None


class Wanted(msgspec.Struct, frozen=True):
    """A structure in our own words. `path` is what the caller calls it."""

    structure: Structure
    text: str
    path: str

    def named(self, error: ShoalError) -> ShoalError:
        """An error about the structure, with the caller's name for it; any other as it is."""
        if not isinstance(error, InvalidRequest) or error.field != self.structure or self.path == self.structure:
            return error
        return type(error)(f"{self.path}: {error.message}", field=self.path, code=error.code)


def wanted_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Wanted | None:
    """What both fields ask for together. Raises InvalidRequest if that is more than one thing."""
    asked = [*_of_format(response_format), *_of_outputs(outputs)]
    if len(asked) > 1:
        message = f"{asked[0].path} and {asked[1].path}: an answer has one structure"
        raise InvalidRequest(message, field=asked[1].path)
    return asked[0] if asked else None


def _of_format(given: ResponseFormat | None) -> list[Wanted]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [Wanted("json_schema", ANY_OBJECT, "response_format")]
    if given.json_schema is None or given.json_schema.schema is None:
        path = "response_format.json_schema"
        raise InvalidRequest(f"{path} must hold a schema", field=path)
    return [Wanted("json_schema", _text(given.json_schema.schema), "response_format.json_schema.schema")]


def _of_outputs(given: StructuredOutputs | None) -> list[Wanted]:
    if given is None:
        return []
    texts: tuple[tuple[Structure, str, str | None], ...] = (
        ("json_schema", "json", None if given.json is None else _text(given.json)),
        ("json_schema", "json_object", ANY_OBJECT if given.json_object else None),
        ("regex", "regex", given.regex),
        ("grammar", "grammar", given.grammar),
    )
    return [
        Wanted(structure, text, f"structured_outputs.{name}") for structure, name, text in texts if text is not None
    ]


def _text(schema: Any) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
