"""Markdown shown while it comes: whole paragraphs are printed for good, nothing is lost or shown twice."""

import io
import re

import pytest
from rich.console import Console

from mesh.cli.markdown_stream import MarkdownSink, PlainSink, finished_length, sink_for

LONG = "\n\n".join(f"Paragraph number{index} of a long answer." for index in range(60))


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("", ""),
        ("still coming", ""),
        ("one line\nanother\n", ""),
        ("done.\n\n", "done.\n\n"),
        ("done.\n\nmore", "done.\n\n"),
        ("a\n\nb\n\nc", "a\n\nb\n\n"),
        ("```py\nx = 1\n\ny = 2\n", ""),
        ("```py\nx = 1\n\ny = 2\n```\n\nafter", "```py\nx = 1\n\ny = 2\n```\n\n"),
        ("~~~\n```\n\n~~~\n\nafter", "~~~\n```\n\n~~~\n\n"),
        ("intro\n\n1. one\n\n2. two\n\n", "intro\n\n"),
        ("- one\n\n- two\n\n", ""),
    ],
)
def test_a_block_is_finished_at_a_blank_line_outside_of_fences_and_lists(text, finished):
    assert text[: finished_length(text)] == finished


def shown(text: str, step: int) -> str:
    """What a terminal of 20 lines has been sent, without the control codes, when text comes in pieces of `step`."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=20, color_system=None)
    with MarkdownSink(console) as sink:
        for start in range(0, len(text), step):
            sink.add(text[start : start + step])
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_an_answer_taller_than_the_window_is_printed_whole():
    lines = {line.strip() for line in shown(LONG, 7).splitlines()}
    assert {f"Paragraph number{index} of a long answer." for index in range(60)} <= lines


def test_finished_paragraphs_are_not_redrawn():
    """Redraws cost the open paragraph only, so the bytes sent stay near the answer's own size."""
    assert len(shown(LONG, 1000)) < 4 * len(LONG)


def test_away_from_a_terminal_the_text_is_left_as_it_is(capsys):
    sink = sink_for(Console(file=io.StringIO()))
    assert isinstance(sink, PlainSink)
    with sink:
        sink.add("**bold** ")
        sink.add("text")
    assert capsys.readouterr().out == "**bold** text\n"
