"""What every test may use. Waiting is always for a state, never for a time."""

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Awaitable, Callable

import pytest

# Read once by OpenMP when a process first loads torch: what the worker's own __main__ sets for its engine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell that runs the tests in the background ignores SIGINT for them, and so would every process they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Condition = Callable[[], object] | Callable[[], Awaitable[object]]


async def _eventually(condition: Condition, timeout_s: float = 10.0, every_s: float = 0.02) -> object:
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(every_s)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[object]]:
    """`await eventually(condition)` returns the first truthy value of `condition()`, or fails the test in time."""
    return _eventually
