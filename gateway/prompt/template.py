"""A model's chat template: from a normalised conversation to the text its model was trained on.

Templates disagree on two shapes, and say so only by what they do. Each is found out once, by rendering a conversation
made for it: whether a call's arguments should arrive as JSON text (DeepSeek's concatenate them) or as an object (Qwen's
and Llama's write `arguments | tojson`), and whether a turn that only calls tools should have no content at all
(DeepSeek's test `content is none`) or an empty one. Where the empty one works, "" it is.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from gateway.prompt.messages import MAX_DEPTH, Message, Tool, ToolCall, check_json
from gateway.prompt.sandbox import Sandbox
from mesh.errors import InvalidRequest

# What running a template can raise besides jinja's own errors: it is code over data that a user chose.
_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_PROBE = "shoal_probe"

# Sees, and may replace, each text that a user wrote.
Change = Callable[[str], str]


class ChatTemplate:
    """`source` is jinja; `special_tokens` are the names it may use (bos_token, eos_token, ...) and their texts."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._sandbox = Sandbox()
        self._special_tokens = dict(special_tokens)
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is broken at line {error.lineno}: {error}", field="model"
            ) from None
        self.has_tools = "tools" in meta.find_undeclared_variables(self._sandbox.parse(source))
        self._parsed_arguments = False
        self._null_content = False
        if "tool_calls" in source:
            self._parsed_arguments = f'"{_PROBE}"' in self._probe(content="", arguments={_PROBE: 1})
            self._null_content = self._prefers_null_content()

    def variables(self, messages: Sequence[Message], tools: Sequence[Tool], change: Change) -> dict[str, Any]:
        """What the template is given: plain dicts in the shape that Hugging Face documents for templates.

        Whatever a user wrote has gone through `change`; roles and the dicts' own keys have not. Raises InvalidRequest
        that names the call's arguments which no template could be given.
        """
        return {
            "messages": [self._turn(f"messages[{i}]", message, change) for i, message in enumerate(messages)],
            "tools": [_function(tool, change) for tool in tools] or None,
        }

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text, up to where the assistant answers. Raises InvalidRequest (field `messages`) if the
        template does, or cannot cope with this conversation.
        """
        try:
            return self._render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses this: {error}", field="messages") from None
        except _FAILURES as error:
            raise InvalidRequest(f"the model's chat template cannot render this: {error}", field="messages") from None

    def _render(self, variables: Mapping[str, Any]) -> str:
        given = {**self._special_tokens, "documents": None, "add_generation_prompt": True, **variables}
        return self._sandbox.render(self._template, given)

    def _turn(self, path: str, message: Message, change: Change) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": message.role, "content": change(message.content)}
        if message.name is not None:
            turn["name"] = change(message.name)
        if message.tool_call_id is not None:
            turn["tool_call_id"] = change(message.tool_call_id)
        if message.tool_calls:
            turn["tool_calls"] = [
                self._call(f"{path}.tool_calls[{i}].function.arguments", call, change)
                for i, call in enumerate(message.tool_calls)
            ]
            if not message.content and self._null_content:
                turn["content"] = None
        return turn

    def _call(self, path: str, call: ToolCall, change: Change) -> dict[str, Any]:
        # Changed after parsing: JSON can spell a character as an escape.
        function = {"name": change(call.name), "arguments": _changed(self._arguments(path, call), change)}
        return {"id": change(call.id), "type": "function", "function": function}

    def _arguments(self, path: str, call: ToolCall) -> Any:
        """As the template takes them. Arguments that are no JSON object stay the text they are."""
        if not self._parsed_arguments:
            return call.arguments
        try:
            parsed = json.loads(call.arguments)
        except ValueError:
            return call.arguments
        except RecursionError:
            raise InvalidRequest(f"{path} nests more than {MAX_DEPTH} levels deep", field=path) from None
        # JSON can spell what no text could hold: half of a surrogate pair, as an escape.
        return check_json(path, parsed) if isinstance(parsed, dict) else call.arguments

    def _prefers_null_content(self) -> bool:
        arguments = {_PROBE: 1} if self._parsed_arguments else json.dumps({_PROBE: 1})
        with_null = self._probe(content=None, arguments=arguments)
        return _PROBE in with_null and "None" not in with_null and _PROBE not in self._probe("", arguments)

    def _probe(self, content: str | None, arguments: Any) -> str:
        """A short tool conversation as the template renders it; "" if it cannot."""
        call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": "call00000", "name": "probe"},
        ]
        try:
            return self._render({"messages": turns, "tools": None})
        except (jinja2.TemplateError, *_FAILURES):
            return ""


def _function(tool: Tool, change: Change) -> dict[str, Any]:
    schema = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {key: _changed(value, change) for key, value in schema.items()}}


def _changed(value: Any, change: Change) -> Any:
    """JSON `value` with `change` applied to every text in it, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    return value
