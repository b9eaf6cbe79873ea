"""Templates mean what they mean to transformers, and cannot run away."""

import json

import pytest

from gateway.prompt import sandbox
from gateway.prompt.messages import Message, Tool, ToolCall
from gateway.prompt.template import ChatTemplate
from mesh.errors import InvalidRequest

CALLING = Message("assistant", "", (ToolCall("c1", "weather", '{"city": "Zürich"}'),))
TOOLED = [Message("user", "hi"), CALLING, Message("tool", "sunny", tool_call_id="c1")]

CONCATENATING = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for t in m['tool_calls'] %}{{ t['function']['name'] + ':' + t['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
SERIALISING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for t in m.tool_calls or [] %}{{ t.function.name }}:{{ t.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


def same(text: str) -> str:
    return text


def rendered(source: str, messages: list[Message], tools: tuple[Tool, ...] = ()) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"})
    return template.render(template.variables(messages, tools, same))


def test_arguments_reach_a_concatenating_template_as_text_and_its_calling_turn_has_no_content() -> None:
    assert rendered(CONCATENATING, TOOLED) == '[user]hi[assistant]weather:{"city": "Zürich"}[tool]sunny'


def test_arguments_reach_a_serialising_template_as_an_object_and_nothing_prints_none() -> None:
    assert rendered(SERIALISING, TOOLED) == '[user]hi[assistant]weather:{"city": "Zürich"}[tool]sunny'


def test_broken_arguments_stay_the_text_they_are() -> None:
    broken = Message("assistant", "", (ToolCall("c1", "weather", '{"city": '),))
    assert rendered(SERIALISING, [broken]) == f"[assistant]weather:{json.dumps(broken.tool_calls[0].arguments)}"


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', '{"a": {"\\udfff": 1}}', '{"a": ' * 900 + "1" + "}" * 900, '{"a": ' * 100_000]
)
def test_arguments_that_no_template_could_be_given_are_refused_by_their_path(arguments: str) -> None:
    calls = (ToolCall("c1", "f", "{}"), ToolCall("c2", "f", arguments))
    with pytest.raises(InvalidRequest) as refused:
        rendered(SERIALISING, [Message("user", "hi"), Message("assistant", "", calls)])
    assert refused.value.field == "messages[1].tool_calls[1].function.arguments"


def test_tools_are_rendered_without_html_escapes() -> None:
    text = rendered(SERIALISING, [], (Tool("f", "a < b & 'c'"),))
    assert "a < b & 'c'" in text


def test_a_template_without_tools_says_so() -> None:
    assert not ChatTemplate("{{ messages }}", {}).has_tools
    assert ChatTemplate(SERIALISING, {}).has_tools


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n{% if loop.first %}{% continue %}{% endif %}\nx{% endfor %}", "x"),
        ("a{% generation %}b{{ eos_token }}{% endgeneration %}c", "ab</s>c"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_what_hugging_face_templates_use_is_there(source: str, text: str) -> None:
    assert rendered(source, [Message("user", "a"), Message("user", "b")]).strip() == text


def test_what_a_template_refuses_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        rendered("{{ raise_exception('roles must alternate') }}", [])
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[3].content }}",
        "{{ 'a' + 1 }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 'x' * 100000000 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in range(1000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_refused_and_not_a_crash(source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rendered(source, [Message("user", "a")])
    assert refused.value.field == "messages"


def test_loops_without_an_end_in_sight_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RENDER_S", 0.05)
    nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="longer than"):
        rendered(nested, [])


def test_a_text_without_bounds_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="more than"):
        rendered("{% for a in range(9999) %}xx{% endfor %}", [])


def test_a_broken_template_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(InvalidRequest, match="line 2") as refused:
        ChatTemplate("a\n{% for %}", {})
    assert refused.value.field == "model"
