"""Runs tokenizing beside the event loop, in a few threads with a bounded queue.

Only what lets go of the interpreter is worth sending here: `Tokenizer.encode` holds it for its whole run (3 s for 2 MB
of text, measured), `encode_batch_fast` does not.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

from mesh.errors import Overloaded

THREADS = min(4, max(2, os.cpu_count() or 2))
# More than these waiting is seconds of work: better told to come back than left to queue.
WAITING = 256

T = TypeVar("T")


class Offload:
    """A pool of threads. One per process; `async with` it around the process's work."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prompt")
        self._waiting = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drops what waits. A thread at work is not waited for here: nobody wants its prompt any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """`work()` in a thread. A cancelled caller gives up its place in the queue. Raises Overloaded when too much
        waits.
        """
        if self._waiting >= WAITING:
            raise Overloaded("too many prompts wait to be tokenized", retry_after_s=1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting -= 1
