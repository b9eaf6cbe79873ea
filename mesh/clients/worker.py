"""The worker as a gateway sees it: one attempt of a request as a stream of plain events, failures classified.

Owns the channels to workers (one per address), the detection of a hung worker, and the check that tokens arrive
without gap or repeat. Retries nothing: whoever holds the lease decides.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import grpc

from mesh.client import connect
from mesh.clients.attempt import Accepted, ChoiceEnd, Event, Job, Logprob, Tokens
from mesh.clients.outcomes import FailureKind, Reason, RefusedCause, WorkerFailed, WorkerRefused
from mesh.clients.silence import SilenceAlarm
from mesh.clients.usage import usage_of
from mesh.errors import DeadlineExceeded, InvalidRequest, error_of
from mesh.tls import WORKER, Tls
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2, worker_pb2_grpc

# Silence that means hung: the proto's max(1.5 s, 20 median steps).
HUNG_S = 1.5
HUNG_STEPS = 20
STOP_TIMEOUT_S = 1.5
GOODBYE_S = 1.0
# Channels kept to workers that nobody talks to at the moment.
IDLE_CHANNELS = 64

Metadata = tuple[tuple[str, str], ...]
_Response = worker_pb2.GenerateResponse

log = logging.getLogger("shoal.workers")


class Generation:
    """A running attempt. Iterate `events` once; leaving `Workers.generation` cancels it on the worker."""

    def __init__(self, job: Job, call: "grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, _Response]") -> None:
        self._call = call
        self._next = {index: len(ids) for index, ids in job.choices.items()}
        self._logprobs = job.sampling.top_logprobs is not None
        self._heard = False
        self._cut: Exception | None = None
        self._alarm = SilenceAlarm(HUNG_S, self._hung)

    def cut(self, error: Exception) -> None:
        """End it from outside: whoever reads `events` gets `error`."""
        self._cut = self._cut or error
        self._call.cancel()

    async def close(self) -> None:
        """Over, in good order if every choice has ended: the worker's own goodbye is heard then, not cut."""
        self._alarm.close()
        try:
            if not self._next and self._cut is None:
                async with asyncio.timeout(GOODBYE_S):
                    await self._call.code()
        except TimeoutError:
            log.warning("a worker ended every choice and not the call")
        finally:
            self._call.cancel()

    def _hung(self) -> None:
        self.cut(WorkerFailed(FailureKind.HUNG, f"the worker was silent for {self._alarm.limit_s:.1f} s"))

    async def events(self) -> AsyncGenerator[Event, None]:
        """Until every choice has ended. Raises WorkerRefused, WorkerFailed, InvalidRequest or DeadlineExceeded."""
        call, alarm = self._call, self._alarm
        try:
            while self._next:
                alarm.listen()
                response = await call.read()
                alarm.heard()
                if not isinstance(response, worker_pb2.GenerateResponse):
                    raise WorkerFailed(FailureKind.PROTOCOL, "the stream ended before its choices")
                self._heard = True
                event = self._read(response)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise _classified(error, self._heard) from error
        except asyncio.CancelledError:
            # A call that was cancelled locally reads as CancelledError, like a task that was; the flag tells.
            task = asyncio.current_task()
            if self._cut is None or (task is not None and task.cancelling()):
                raise
            raise self._cut from None

    def _read(self, response: _Response) -> Event | None:
        kind = response.WhichOneof("event")
        if kind == "tokens":
            return self._tokens(response.tokens)
        if kind == "finished":
            return self._finished(response.finished)
        if kind == "accepted":
            accepted = response.accepted
            cached: dict[int, int] = {part.tier: part.tokens for part in accepted.cached}
            return Accepted(cached, accepted.precision, accepted.model_digest, accepted.queue_ms)
        if kind == "progress":
            self._alarm.limit_s = max(HUNG_S, HUNG_STEPS * response.progress.median_step_ms / 1000)
        return None  # an event that a newer worker sends is none of ours

    def _tokens(self, tokens: worker_pb2.Tokens) -> Tokens:
        choice, ids = tokens.choice, tokens.ids[:]  # as a list: eight times as fast as list()
        if self._next.get(choice) != tokens.position:
            expected = self._next.get(choice, "none")
            raise WorkerFailed(
                FailureKind.PROTOCOL, f"choice {choice}: position {tokens.position} where {expected} was due"
            )
        self._next[choice] += len(ids)
        if not self._logprobs:
            return Tokens(choice, tokens.position, ids)
        if len(tokens.logprobs) != len(ids):
            raise WorkerFailed(FailureKind.PROTOCOL, f"choice {choice}: {len(ids)} ids without their log-probabilities")
        return Tokens(choice, tokens.position, ids, tuple(map(_logprob, tokens.logprobs)))

    def _finished(self, finished: worker_pb2.Finished) -> ChoiceEnd:
        if self._next.pop(finished.choice, None) is None:
            raise WorkerFailed(FailureKind.PROTOCOL, f"choice {finished.choice} ended without running")
        if finished.reason not in _REASONS:
            raise WorkerFailed(
                FailureKind.PROTOCOL, f"choice {finished.choice} ended for reason {finished.reason}, unknown here"
            )
        return ChoiceEnd(
            finished.choice,
            Reason(finished.reason),
            finished.completion_tokens,
            usage_of(finished.usage),
            finished.message,
        )


# A newer worker may have more.
_REASONS = frozenset(map(int, Reason))


def _logprob(message: types_pb2.TokenLogprob) -> Logprob:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return Logprob(message.token_id, message.logprob, top)


_REFUSALS = {
    "no_room": RefusedCause.NO_ROOM,
    "draining": RefusedCause.DRAINING,
    "not_ready": RefusedCause.NOT_READY,
    "mismatch": RefusedCause.MISMATCH,
}


def _classified(error: grpc.aio.AioRpcError, heard: bool) -> Exception:
    """What a status of Generate means to the lease's holder (worker.proto lists them)."""
    status, meant = error.code(), error_of(error)
    if isinstance(meant, InvalidRequest | DeadlineExceeded):
        return meant
    if status is grpc.StatusCode.ALREADY_EXISTS:
        return WorkerRefused(RefusedCause.ALREADY_EXISTS, meant.message)
    if meant.code in _REFUSALS and (not heard or meant.code == "draining"):
        return WorkerRefused(_REFUSALS[meant.code], meant.message, meant.retry_after_s)
    if status is grpc.StatusCode.FAILED_PRECONDITION:
        return WorkerRefused(RefusedCause.MISMATCH, meant.message)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and not heard:
        return WorkerRefused(RefusedCause.NO_ROOM, meant.message, meant.retry_after_s)
    if status is grpc.StatusCode.INTERNAL and meant.code is not None:
        return WorkerFailed(FailureKind.STEP_ERROR, meant.message)
    if status is grpc.StatusCode.UNAVAILABLE and not heard:
        return WorkerFailed(FailureKind.CONNECT, meant.message)
    return WorkerFailed(FailureKind.RESET, f"{status.name}: {meant.message}")


class _Link:
    """A channel to one worker and how many calls hold it."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self._tls = tls
        self._pems = tls.current() if tls is not None else None
        self.channel = connect(address, tls, WORKER)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.users = 0

    @property
    def outdated(self) -> bool:
        """There are newer certificates than those that the channel will show when it connects again."""
        return self._tls is not None and self._tls.current() is not self._pems


class Workers:
    """Channels to workers by address. `async with Workers() as workers` closes them all."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._links: dict[str, _Link] = {}

    async def __aenter__(self) -> "Workers":
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self._links.values():
            await link.channel.close()
        self._links.clear()

    @asynccontextmanager
    async def _link(self, address: str) -> AsyncIterator[_Link]:
        # Taken out and put back: the dictionary's order is the order of last use.
        former = self._links.pop(address, None)
        link = former if former is not None and not former.outdated else _Link(address, self._tls)
        self._links[address] = link
        link.users += 1
        try:
            if former is not None and former is not link and not former.users:
                await former.channel.close()
            yield link
        finally:
            link.users -= 1
            if not link.users and self._links.get(address) is not link:
                await link.channel.close()
            await self._close_idle()

    async def _close_idle(self) -> None:
        idle = [address for address, link in self._links.items() if not link.users]
        for address in idle[: max(0, len(self._links) - IDLE_CHANNELS)]:
            await self._links.pop(address).channel.close()

    @asynccontextmanager
    async def generation(
        self, address: str, job: Job, *, timeout_s: float, metadata: Metadata = ()
    ) -> AsyncIterator[Generation]:
        """Run `job` on the worker at `address`; leaving the block ends it there, however it was left."""
        async with self._link(address) as link:
            generation = Generation(job, link.stub.Generate(job.to_proto(), timeout=timeout_s, metadata=metadata))
            try:
                yield generation
            finally:
                await generation.close()

    async def stop_choices(self, address: str, job: Job, keep: dict[int, int]) -> None:
        """End choices whose text met a stop string; `keep` maps a choice to the output tokens that count."""
        stops = [worker_pb2.StopChoice(choice=choice, keep_tokens=tokens) for choice, tokens in keep.items()]
        request = worker_pb2.StopChoicesRequest(request_id=job.meta.request_id, attempt=job.attempt, choices=stops)
        async with self._link(address) as link:
            try:
                await link.stub.StopChoices(request, timeout=STOP_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise WorkerFailed(FailureKind.RESET, f"StopChoices: {error.details()}") from error
