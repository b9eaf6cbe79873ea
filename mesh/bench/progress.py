"""A bar on stderr for long work. It is drawn at most once a second and knows what drawing cost, so that a benchmark
can leave that out of its figures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_S = 1.0


class Bar:
    """Counts up to `total` (None = unknown). Away from a terminal it draws nothing."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress = progress
        self._task = task
        self._next = 0.0
        self.done = 0
        self.cpu_s = 0.0  # spent on drawing

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if not self._progress.disable and time.monotonic() >= self._next:
            self._draw()

    def say(self, words: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=words)
        self._draw()

    def _draw(self) -> None:
        before = time.thread_time()
        self._progress.update(self._task, completed=self.done, refresh=True)
        self._next = time.monotonic() + REFRESH_S
        self.cpu_s += time.thread_time() - before


@contextmanager
def bar(words: str, total: float | None) -> Iterator[Bar]:
    """A bar that goes away at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(words, total=total)
        shown = Bar(progress, task)
        shown.say(words)
        yield shown
