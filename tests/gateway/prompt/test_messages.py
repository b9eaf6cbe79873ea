"""Every shape of a message has one answer: a complete turn, or a refusal that names what to change."""

import time
from typing import Any

import pytest

from gateway.prompt.messages import Message, Tool, ToolCall, normalise, normalise_tools
from mesh.errors import InvalidRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
USER = {"role": "user", "content": "hi"}


def nested(levels: int) -> dict[str, Any]:
    """An object of so many levels."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_an_assistant_turn_that_only_calls_tools_has_empty_content(content: dict[str, Any]) -> None:
    messages = normalise([USER, {"role": "assistant", "tool_calls": [CALL], **content}])
    assert messages[1] == Message("assistant", "", (ToolCall("c1", "weather", '{"city": "Paris"}'),))


def test_a_tool_result_keeps_its_call() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    messages = normalise([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result])
    assert messages[2] == Message("tool", "sunny", tool_call_id="c1")


def test_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert normalise([{"role": "user", "content": parts}])[0].content == "a b"


@pytest.mark.parametrize("calls", [{"tool_calls": []}, {"tool_calls": None}, {}])
def test_no_tool_calls_are_the_same_however_they_are_written(calls: dict[str, Any]) -> None:
    assert normalise([{"role": "assistant", "content": "x", **calls}]) == [Message("assistant", "x")]


def test_a_developer_turn_is_a_system_turn_and_may_come_in_the_middle() -> None:
    roles = [m.role for m in normalise([USER, {"role": "developer", "content": ""}, USER])]
    assert roles == ["user", "system", "user"]


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ({"role": "user"}, "messages"),
        ("hi", "messages"),
        ([USER, None], "messages[1]"),
        ([USER, "hi"], "messages[1]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": 3, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "system", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "hi"}}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{**USER, "name": 1}], "messages[0].name"),
        ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{**USER, "tool_call_id": "c1"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": CALL}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": "x"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "sunny"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "sunny", "tool_call_id": "c1"}], "messages[0].tool_call_id"),
    ],
)
def test_a_shape_that_is_not_taken_names_its_path(raw: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalise(raw)
    assert refused.value.field == field
    assert field.split(".")[0] in refused.value.message


def test_a_refusal_quotes_little_of_what_was_sent() -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalise([{"role": "x" * 10_000, "content": ""}])
    assert len(refused.value.message) < 200


def test_tools_are_functions_with_a_schema() -> None:
    raw = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert normalise_tools(raw) == [Tool("f", "", {"type": "object"})]
    assert normalise_tools(None) == []
    deep = {"function": {"name": "f", "parameters": nested(64)}}
    assert normalise_tools([deep]) == [Tool("f", "", nested(64))]


def test_looking_for_half_characters_takes_milliseconds_for_megabytes() -> None:
    text = "é" * 4_000_000
    began = time.process_time()
    normalise([{"role": "user", "content": text}])
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ("f", "tools"),
        ([{"type": "retrieval"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"function": {"name": ""}}], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": "{}"}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "parameters": {"a": ["\ud800"]}}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "parameters": {"a": {"\ud800": 1}}}}], "tools[0].function.parameters"),
        (
            [{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": nested(65)}}],
            "tools[1].function.parameters",
        ),
    ],
)
def test_a_tool_that_is_not_taken_names_its_path(raw: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalise_tools(raw)
    assert refused.value.field == field
