"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}, with Retry-After."""

import re
from typing import Any, TypeVar

import msgspec

from mesh.errors import InvalidRequest, ShoalError, kind_of, retry_after_header

# Statuses that mean "come back later"; a client must be told when (fault B10).
_LATER = (429, 503)
_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_CHARACTER = re.compile(r"invalid character \(byte (?P<at>\d+)\)$")
_NO_NUMBER = re.compile(rb"NaN|Infinity")
_NAMED = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<name>[^`]*)`")

T = TypeVar("T")


def status_of(error: ShoalError) -> int:
    return kind_of(error).http


def error_body(error: ShoalError) -> bytes:
    """OpenAI's error object as JSON."""
    fields: dict[str, Any] = {
        "message": error.message,
        "type": kind_of(error).openai_type,
        "param": error.field,
        "code": error.code,
    }
    return msgspec.json.encode({"error": fields})


def plain_error(message: str, code: str) -> bytes:
    """An error of HTTP itself (no such path, method or media type), in the same shape."""
    return msgspec.json.encode(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    )


def error_headers(error: ShoalError) -> list[tuple[bytes, bytes]]:
    """Retry-After where waiting helps: whole seconds, at least 1."""
    wait = retry_after_header(error) or ("1" if status_of(error) in _LATER else None)
    return [] if wait is None else [(b"retry-after", wait.encode())]


def parse(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """The body as its struct. Raises InvalidRequest that names the field by its path."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(_not_json(str(error), body), code="invalid_json") from None


def _not_json(said: str, body: bytes) -> str:
    """msgspec says where, and not that there is nothing, nor that what is there is a number elsewhere."""
    if not body.strip():
        return "the body is empty"
    at = _CHARACTER.search(said)
    word = _NO_NUMBER.match(body, int(at["at"])) if at else None
    return f"the body is not JSON, which has no {word[0].decode()}: {said}" if word else f"the body is not JSON: {said}"


def _wrong_field(said: str) -> InvalidRequest:
    """msgspec says what and where: "Expected `int`, got `str` - at `$.a[0].b`"."""
    at = _AT.search(said)
    path = at["path"].replace("[...]", "") if at else ""
    what = said[: at.start()] if at else said
    if named := _NAMED.match(what):
        path = f"{path}.{named['name']}" if path else named["name"]
        unknown = what.startswith("Object contains")
        return InvalidRequest(f"{path} is {'not a field we know' if unknown else 'required'}", field=path)
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {what}")
    return InvalidRequest(f"{path}: {what[0].lower()}{what[1:].replace('`', '')}", field=path)
