"""A rival's processes stand still while others are measured.

An idle vLLM server goes on polling; on two cores that took half of the speed of whatever was measured beside it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil


class Asleep:
    """The processes of `pid` and what it has started. They sleep until `awake`, and are woken for good by `wake`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._each(psutil.Process.suspend)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Run during the block."""
        self.wake()
        try:
            yield
        finally:
            self._each(psutil.Process.suspend)

    def wake(self) -> None:
        """Run again: what sleeps cannot be told to end."""
        self._each(psutil.Process.resume)

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._pid)
            for one in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    act(one)
