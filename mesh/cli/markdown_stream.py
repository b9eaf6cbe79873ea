"""Shows an answer while it comes: as live Markdown on a terminal, as plain text anywhere else.

Redrawing a whole answer at each token would leave torn copies above once it is taller than the window. So paragraphs
that are finished are printed for good, and only the last one is redrawn.
"""

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

REDRAWS_PER_S = 12


class Sink(Protocol):
    """Takes an answer's text as it comes."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def add(self, text: str) -> None: ...


class MarkdownSink:
    """Live Markdown. Use as `with`: leaving it prints what is left."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=REDRAWS_PER_S, vertical_overflow="crop")
        self._open = ""  # what may still change

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def add(self, text: str) -> None:
        self._open += text
        cut = finished_length(self._open)
        if cut:
            self._live.console.print(Markdown(self._open[:cut]), "")
            self._open = self._open[cut:]
        self._live.update(Markdown(self._open))


class PlainSink:
    """The text as it is, for pipes and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    def add(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def sink_for(console: Console) -> Sink:
    return MarkdownSink(console) if console.is_terminal else PlainSink()


def finished_length(text: str) -> int:
    """How many characters at the front are whole blocks: up to the last blank line outside of a code fence.

    A block inside a list stays open with its list, so that its numbers and indents hold together.
    """
    finished = position = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        stripped = line.strip()
        if stripped[:3] in ("```", "~~~") and (not fence or stripped.startswith(fence)):
            fence = "" if fence else stripped[:3]
        elif not stripped and line.endswith("\n") and not fence and not _in_list(text[finished:position]):
            finished = position
    return finished


def _in_list(block: str) -> bool:
    first = block.lstrip("\n")
    marker = first.split(maxsplit=1)[0] if first.strip() else ""
    return marker in ("-", "*", "+") or marker.rstrip(".)").isdigit()
