"""One Acquire RPC: events go out, grants come back, and its loss is told apart from what the scheduler says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import grpc

from mesh.clients.placement import Grant, LeaseEvent, grant_of
from mesh.errors import error_of
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

# Statuses with which a scheduler that dies or is being replaced ends its calls. INTERNAL without a Cause is gRPC's own:
# a write that met a call just broken ("Internal error from Core").
_LOSSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
# Unsent at most: a question, the last word, and the end as told by us and by the call.
_MOST_UNSENT = 4


class Lost(Exception):
    """The RPC broke under us, or its scheduler is leaving: another try may succeed."""


class Dialogue:
    """Begins the RPC at once; `ended` is called when it is over, whoever ended it. One question at a time."""

    def __init__(
        self,
        stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub",
        ended: Callable[["Dialogue"], None],
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._ended = ended
        # Events go out through an iterator and not through `write`: a write that waits for the connection is never
        # woken when the channel is closed meanwhile, because grpc.aio cancels the very task that would wake it. A read
        # waits for that task itself, and ends with it.
        self._unsent: asyncio.Queue[LeaseEvent | None] = asyncio.Queue(_MOST_UNSENT)
        self._call = stub.Acquire(self._events(), timeout=timeout_s, metadata=metadata)
        self._call.add_done_callback(self._on_done)

    @property
    def over(self) -> bool:
        """Whether the RPC has ended."""
        return self._call.done()

    async def ask(self, event: LeaseEvent) -> Grant:
        """One event, one Grant. Raises Lost where another try may succeed, else what the scheduler said."""
        self._unsent.put_nowait(event)
        with _losses():
            reply = await self._call.read()
        if not isinstance(reply, scheduler_pb2.Grant):
            raise Lost("it closed the lease")
        return grant_of(reply)

    async def finish(self, event: LeaseEvent) -> None:
        """The last word; returns when the RPC has ended, however."""
        if self.over:
            return
        # Not closed from here: the scheduler ends the RPC when it reads this; a half-close would be one write more.
        self._unsent.put_nowait(event)
        await self._call.code()

    def cancel(self) -> None:
        """End it without a word, if it has not ended."""
        self._call.cancel()

    async def _events(self) -> AsyncIterator[LeaseEvent]:
        while (event := await self._unsent.get()) is not None:
            yield event

    def _on_done(self, _: object) -> None:
        self._unsent.put_nowait(None)
        self._ended(self)


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """Around words with a scheduler: Lost where it went away, a ShoalError where it said something."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        meant = error_of(error)
        if error.code() in _LOSSES and meant.code in (None, "draining"):
            raise Lost(meant.message) from error
        raise meant from error
    except asyncio.CancelledError:
        # A closed channel cancels its calls, which reads like a cancelled task; only the task itself knows better.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Lost("the channel was closed") from None
