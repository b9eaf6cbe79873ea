"""From a validated request to the events of its answer, through any number of schedulers and workers.

One resume path (design §1.9): whatever ends an attempt early (the worker refused, broke, hung, drained or parked it),
the lease is told, gives another grant, and the next attempt gets the prompt with the ids that each unfinished choice
has. Sampling is a function of (seed, choice, position), so the client sees one unbroken stream.

Nobody waits for ever: silence is noticed by the worker's client, and a lease for which no worker has come in time ends
with a status, which becomes the answer's error.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from gateway.booking import Books
from gateway.catalogue import Catalogue
from gateway.choice import unfinished
from gateway.ending import Ending
from gateway.metrics import Metrics
from gateway.output import Output
from gateway.plan import demand_of, job_of, more_block_keys
from gateway.request import Event, Request
from gateway.tracing import RequestTrace, placed
from mesh.clients.attempt import ChoiceEnd, Tokens
from mesh.clients.lease import Lease, LeaseLimits
from mesh.clients.outcomes import FailureKind, Outcome, WorkerFailed, WorkerRefused
from mesh.clients.placement import Grant
from mesh.clients.scheduler import Schedulers
from mesh.clients.worker import Generation, Workers
from mesh.errors import DeadlineExceeded, Internal, Overloaded, ShoalError, Unavailable, WorkerLost, kind_of

# A request that was placed this often is going round in circles.
MAX_ATTEMPTS = 32

log = logging.getLogger("shoal.relay")

Trouble = WorkerRefused | WorkerFailed | None  # None = parked, in good order


@dataclass(frozen=True, slots=True)
class Mesh:
    """What an answer stands on; one per process."""

    schedulers: Schedulers
    workers: Workers
    catalogue: Catalogue
    books: Books
    metrics: Metrics
    queue_s: float
    no_scheduler_s: float


class Relay:
    """Answers requests, and can cut short all that are under way."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._active: set[Answer] = set()

    async def answer(self, request: Request, trace: RequestTrace) -> AsyncGenerator[Event, None]:
        """The events of one answer; close the generator to cancel it on every hop.

        Raises any ShoalError. Before `Started` nothing has been answered; after it the error ends a broken answer.
        """
        answer = Answer(self._mesh, request, trace)
        self._active.add(answer)
        outcome = "cancelled"
        try:
            async with aclosing(answer.events()) as events:
                async for event in events:
                    yield event
            outcome = "ok"
        except ShoalError as error:
            outcome = str(kind_of(error).http)
            raise
        finally:
            self._active.discard(answer)
            answer.ending.log(outcome)

    def cut(self, error: ShoalError) -> None:
        """End every answer under way with `error`."""
        for answer in self._active:
            answer.cut(error)


class Answer:
    """One request under way."""

    def __init__(self, mesh: Mesh, request: Request, trace: RequestTrace) -> None:
        self._mesh = mesh
        self._request = request
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        model = mesh.catalogue.text(request.model)
        view = mesh.catalogue.serving().get(request.model)
        self._output = Output(request, model, mesh.metrics, simulated=view is not None and view.simulated)
        self._tally = self._output.tally
        self._cut: ShoalError | None = None
        self._lease: Lease | None = None
        self._generation: Generation | None = None

    def cut(self, error: ShoalError) -> None:
        """End it from outside."""
        self._cut = error
        if self._generation is not None:
            self._generation.cut(error)
        if self._lease is not None:
            self._lease.cut(error)

    async def events(self) -> AsyncGenerator[Event, None]:
        booking = await self._mesh.books.reserve(self._request)
        outcome = Outcome.CANCELLED
        try:
            async with aclosing(self._attempts()) as events:
                async for event in events:
                    yield event
            outcome = Outcome.COMPLETED
            lengths = [choice.completion_tokens for choice in self._output.choices]
            await booking.settle(self._tally.usage(), lengths)
            yield self._output.completed(self._queue_ms)
        except DeadlineExceeded:
            outcome = Outcome.DEADLINE
            raise
        except ShoalError:
            outcome = Outcome.ERROR
            raise
        finally:
            try:
                await booking.settle(self._tally.usage())
            finally:
                await self._give_back(outcome)

    async def _give_back(self, outcome: Outcome) -> None:
        self.ending.describe(self._trace)
        if self._lease is not None:
            self._mesh.metrics.queued(self._request.model, self._lease.queued_s)
            await self._lease.close(outcome, self._tally.usage())

    async def _attempts(self) -> AsyncGenerator[Event, None]:
        """Attempt after attempt until every choice has ended."""
        grant = await self._open()
        while True:
            trouble: Trouble = None
            try:
                async with aclosing(self._attempt(grant)) as events:
                    async for event in events:
                        yield event
            except (WorkerRefused, WorkerFailed) as error:
                trouble = error
            for event in self._output.abandoned():
                yield event
            if not unfinished(self._output.choices):
                return
            grant = await self._again(grant, trouble)

    async def _open(self) -> Grant:
        request, mesh = self._request, self._mesh
        demand = await demand_of(request, mesh.catalogue, mesh.books.expected_tokens(request))
        limits = LeaseLimits(mesh.queue_s, mesh.no_scheduler_s, request.deadline)
        with self._trace.child("shoal.acquire") as child:
            self._lease = lease = mesh.schedulers.lease(demand, limits, child.metadata)
            if self._cut is not None:
                raise self._cut
            grant = await lease.open()
            placed(child, grant)
        return grant

    async def _again(self, grant: Grant, trouble: Trouble) -> Grant:
        """Tell the lease why the attempt ended and wait for another place."""
        lease = self._lease
        if lease is None:
            raise RuntimeError("an attempt without a lease")
        cause = _cause(trouble)
        self._mesh.metrics.resumed(cause)
        log.info(
            "%s: attempt %d on %s: %s (%s)", self._request.request_id, grant.attempt, grant.worker_id, cause, trouble
        )
        if grant.attempt >= MAX_ATTEMPTS:
            raise Overloaded(f"no worker kept this request in {grant.attempt} attempts", retry_after_s=5)
        waited_s = lease.queued_s
        with self._trace.child("shoal.acquire") as child:
            try:
                if isinstance(trouble, WorkerRefused):
                    again = await lease.refused(trouble.cause, trouble.retry_after_s)
                elif isinstance(trouble, WorkerFailed):
                    again = await self._after_failure(lease, trouble)
                else:
                    keys = await more_block_keys(self._request, self._mesh.catalogue, self._output)
                    again = await lease.parked(self._tally.emitted, keys)
            except Unavailable as error:
                raise self._hopeless(trouble, error, lease.queued_s - waited_s) from error
            placed(child, again)
        return again

    async def _after_failure(self, lease: Lease, failure: WorkerFailed) -> Grant:
        if failure.kind is FailureKind.STEP_ERROR:
            self._tally.step_errors += 1
            if self._tally.step_errors > 1:
                raise _step_error()
        return await lease.failed(failure.kind, str(failure), self._tally.emitted)

    def _hopeless(self, trouble: Trouble, error: Unavailable, waited_s: float) -> ShoalError:
        """No worker came for it: what the client is told."""
        if self._cut is not None or not isinstance(trouble, WorkerFailed):
            return error
        if trouble.kind is FailureKind.STEP_ERROR:
            return _step_error()
        return WorkerLost(
            f"the worker broke, and in {waited_s:.1f} s none came that could go on with this answer",
            code="worker_lost",
            retry_after_s=error.retry_after_s or 1,
        )

    async def _attempt(self, grant: Grant) -> AsyncGenerator[Event, None]:
        """One attempt on one worker, to its end. Choices that it parked are still unfinished then."""
        if self._cut is not None:
            raise self._cut
        request = self._request
        job = job_of(request, self._mesh.catalogue, self._output, grant)
        timeout_s = request.deadline - self._loop.time()
        if timeout_s <= 0:
            raise DeadlineExceeded("the request's time is over")
        self._tally.begin(grant)
        with self._trace.child("shoal.generate") as child:
            generating = self._mesh.workers.generation(grant.address, job, timeout_s=timeout_s, metadata=child.metadata)
            async with generating as self._generation, aclosing(self._generation.events()) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        choice = self._output.choices[event.choice]
                        stopped = choice.kept is not None
                        for out in self._output.tokens(event):
                            yield out
                        if choice.kept is not None and not stopped:
                            await self._mesh.workers.stop_choices(grant.address, job, {choice.index: choice.kept})
                    elif isinstance(event, ChoiceEnd):
                        for out in self._output.ended(event):
                            yield out
                    else:
                        self._tally.accepted(event)
                        if self._lease is not None:
                            self._lease.pin(self._tally.model_digest, self._tally.precision)
            self._generation = None

    @property
    def _queue_ms(self) -> int:
        return 0 if self._lease is None else round(self._lease.queued_s * 1000)

    @property
    def ending(self) -> Ending:
        """The request as it stands now, which is for the end."""
        total_s = self._loop.time() - self._request.arrived
        return Ending(self._request, self._output, self._queue_ms, round(total_s * 1000))


def _step_error() -> Internal:
    return Internal("this request failed inside a step of the model", code="step_error")


def _cause(trouble: Trouble) -> str:
    if isinstance(trouble, WorkerRefused):
        return f"refused_{trouble.cause.name.lower()}"
    if isinstance(trouble, WorkerFailed):
        return f"failed_{trouble.kind.name.lower()}"
    return "parked"
