"""A conversation in one shape, and the one place that says which shapes are taken.

Both front doors hand in OpenAI's JSON shape as plain Python (`RawMessage`); what leaves is complete: `content` is
always text, never None, so that no template can print "None". The rules:

- Content may be text or a list of text parts, which are joined as they are. Absent, null and [] mean "" for an
  assistant (it may only have called tools) and for a tool (it may have returned nothing). A user or system turn must
  have content, which may be "".
- `tool_calls` belongs to assistants; absent, null and [] are the same.
- A tool turn answers a call of an earlier assistant turn, named by `tool_call_id`.
- "developer" is taken as "system". Any other role, part or type is refused with the path of what is wrong.

The order of roles is the template's business: it raises on what its model was not trained for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from mesh.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_TOOLS = 128
# Of a tool's schema or a call's arguments; templates and JSON writers recurse over them.
MAX_DEPTH = 64
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MAY_BE_SILENT = frozenset({"assistant", "tool"})


class RawMessage(TypedDict, total=False):
    """A message as a client wrote it (OpenAI's JSON). Nothing here is checked, hence `Any`."""

    role: Any
    content: Any
    name: Any
    tool_calls: Any
    tool_call_id: Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON as the model wrote it, which may be broken."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `role` is one of ROLES' values."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


def normalise(raw: Any) -> list[Message]:
    """The turns of a request's `messages`. Raises InvalidRequest that names the first bad field by its path."""
    turns = _list("messages", raw)
    if not turns:
        raise InvalidRequest("messages must hold at least one message", field="messages")
    if len(turns) > MAX_MESSAGES:
        raise InvalidRequest(f"messages holds {len(turns)} messages, more than {MAX_MESSAGES}", field="messages")
    called: set[str] = set()
    messages = []
    for i, turn in enumerate(turns):
        message = _message(f"messages[{i}]", _object(f"messages[{i}]", turn))
        if message.role == "tool" and message.tool_call_id not in called:
            path = f"messages[{i}].tool_call_id"
            raise InvalidRequest(f"{path} must name a tool call of an earlier assistant message", field=path)
        called.update(call.id for call in message.tool_calls)
        messages.append(message)
    return messages


def normalise_tools(raw: Any) -> list[Tool]:
    """The functions of a request's `tools` (absent and null mean none). Raises InvalidRequest as `normalise` does."""
    tools = [] if raw is None else _list("tools", raw)
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(tools)} tools, more than {MAX_TOOLS}", field="tools")
    return [_tool(f"tools[{i}]", _object(f"tools[{i}]", tool)) for i, tool in enumerate(tools)]


def check_json(path: str, raw: Any) -> Mapping[str, Any]:
    """`raw`, a parsed JSON object whose texts are all characters and which nests at most MAX_DEPTH deep; else raises
    InvalidRequest that names `path`.
    """
    parsed = _object(path, raw)
    _check_nested(path, (parsed,), MAX_DEPTH)
    return parsed


def _check_nested(path: str, values: Iterable[Any], depth: int) -> None:
    """Written for speed: a schema of some megabytes has a million values."""
    for value in values:
        if isinstance(value, str):
            if not value.isascii():
                _text(path, value)
        elif isinstance(value, dict | list):
            if not depth:
                raise InvalidRequest(f"{path} nests more than {MAX_DEPTH} levels deep", field=path)
            _check_nested(path, value, depth - 1)  # of an object, its keys
            if isinstance(value, dict):
                _check_nested(path, value.values(), depth - 1)


def _message(path: str, raw: Mapping[str, Any]) -> Message:
    role = _role(f"{path}.role", raw.get("role"))
    calls = [] if raw.get("tool_calls") is None else _list(f"{path}.tool_calls", raw["tool_calls"])
    if calls and role != "assistant":
        raise InvalidRequest(f"{path}.tool_calls is only for role assistant", field=f"{path}.tool_calls")
    tool_call_id = _optional_text(f"{path}.tool_call_id", raw.get("tool_call_id"))
    if tool_call_id is not None and role != "tool":
        raise InvalidRequest(f"{path}.tool_call_id is only for role tool", field=f"{path}.tool_call_id")
    return Message(
        role,
        _content(f"{path}.content", raw.get("content"), may_be_absent=role in _MAY_BE_SILENT),
        tuple(_tool_call(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(calls)),
        tool_call_id,
        _optional_text(f"{path}.name", raw.get("name")),
    )


def _role(path: str, raw: Any) -> str:
    role = ROLES.get(raw) if isinstance(raw, str) else None
    if role is None:
        raise InvalidRequest(f"{path} must be one of {', '.join(ROLES)}, not {_shown(raw)}", field=path)
    return role


def _content(path: str, raw: Any, *, may_be_absent: bool) -> str:
    if isinstance(raw, str):
        return _text(path, raw)
    if raw is None and may_be_absent:
        return ""
    if not _is_list(raw):
        raise InvalidRequest(f"{path} must be text or a list of text parts, not {_shown(raw)}", field=path)
    return "".join(_part(f"{path}[{i}]", part) for i, part in enumerate(raw))


def _part(path: str, raw: Any) -> str:
    part = _object(path, raw)
    if part.get("type") != "text":
        raise InvalidRequest(f"{path}.type must be 'text', not {_shown(part.get('type'))}", field=f"{path}.type")
    return _text(f"{path}.text", part.get("text"))


def _tool_call(path: str, raw: Any) -> ToolCall:
    call = _object(path, raw)
    _function_type(path, call)
    function = _object(f"{path}.function", call.get("function"))
    return ToolCall(
        _text(f"{path}.id", call.get("id")),
        _text(f"{path}.function.name", function.get("name")),
        _text(f"{path}.function.arguments", function.get("arguments")),
    )


def _tool(path: str, tool: Mapping[str, Any]) -> Tool:
    _function_type(path, tool)
    function = _object(f"{path}.function", tool.get("function"))
    name = _text(f"{path}.function.name", function.get("name"))
    if not name:
        raise InvalidRequest(f"{path}.function.name must not be empty", field=f"{path}.function.name")
    parameters = function.get("parameters")
    return Tool(
        name,
        _optional_text(f"{path}.function.description", function.get("description")) or "",
        {} if parameters is None else check_json(f"{path}.function.parameters", parameters),
    )


def _function_type(path: str, raw: Mapping[str, Any]) -> None:
    if raw.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type must be 'function', not {_shown(raw['type'])}", field=f"{path}.type")


def _text(path: str, raw: Any) -> str:
    if not isinstance(raw, str):
        raise InvalidRequest(f"{path} must be text, not {_shown(raw)}", field=path)
    try:
        raw.encode()  # the fastest look there is: megabytes in milliseconds
    except UnicodeEncodeError:
        raise InvalidRequest(f"{path} holds half of a surrogate pair, which is no character", field=path) from None
    return raw


def _optional_text(path: str, raw: Any) -> str | None:
    return None if raw is None else _text(path, raw)


def _object(path: str, raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise InvalidRequest(f"{path} must be an object, not {_shown(raw)}", field=path)
    return raw


def _list(path: str, raw: Any) -> Sequence[Any]:
    if not _is_list(raw):
        raise InvalidRequest(f"{path} must be a list, not {_shown(raw)}", field=path)
    items: Sequence[Any] = raw
    return items


def _is_list(raw: Any) -> bool:
    return isinstance(raw, list | tuple)


def _shown(raw: Any) -> str:
    """What was found instead, in a few words that quote no more than 40 characters of it."""
    if raw is None:
        return "null"
    if isinstance(raw, str):
        return repr(raw if len(raw) <= 40 else raw[:40] + "…")
    return {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}.get(
        type(raw), type(raw).__name__
    )
