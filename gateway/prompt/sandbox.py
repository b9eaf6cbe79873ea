"""The jinja environment chat templates run in: Hugging Face's (so that templates mean what they meant there), bounded.

Equal to transformers' `_compile_jinja_template`: trimmed blocks, loop controls, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, and the `generation` tag, which marks text for training and is plain text here.

A template is the operator's file, but it loops over what a user sends. So a rendering has an end: loops stop after
RENDER_S, `range` after 100,000 (jinja's sandbox), `*` and `**` before they make anything large, the text at MAX_CHARS,
recursion at Python's limit. The sandbox keeps templates from Python's internals and from changing their input. It is no
defence against an operator who wants his own gateway to run out of memory.
"""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_S = 2.0
MAX_CHARS = 16_000_000
MAX_REPEAT = 1_000_000
_STEP = "_shoal_step"


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: its body, in a scope of its own."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates whose loops report each turn, so that they can be stopped."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            step = nodes.ExprStmt(nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None))
            loop.body.insert(0, step.set_lineno(loop.lineno).set_environment(self))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*` and `**` with a bounded result. Raises TemplateRuntimeError on a larger one."""
        if operator == "**" and (abs(right) > 64 or abs(left) > MAX_REPEAT):
            raise jinja2.TemplateRuntimeError("the chat template raises to too high a power")
        if operator == "*" and max(_repeated(left, right), _repeated(right, left)) > MAX_REPEAT:
            raise jinja2.TemplateRuntimeError("the chat template repeats a text too often")
        return super().call_binop(context, operator, left, right)

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """`template`'s text. Raises TemplateRuntimeError when it takes too long or grows too large."""
        return "".join(_bounded(template.generate({**variables, _STEP: _Steps(RENDER_S).step})))


class _Steps:
    """Counts loop turns and looks at the clock now and then."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self._turns = 0

    def step(self) -> None:
        self._turns += 1
        if self._turns % 256 == 0 and time.monotonic() > self._end:
            raise jinja2.TemplateRuntimeError(f"the chat template took longer than {RENDER_S:g} s")


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARS:
            raise jinja2.TemplateRuntimeError(f"the chat template wrote more than {MAX_CHARS} characters")
        yield piece


def _repeated(value: Any, times: Any) -> int:
    """Length of `value * times`, where that repeats a sequence."""
    if isinstance(value, str | list | tuple) and isinstance(times, int):
        return len(value) * times
    return 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
