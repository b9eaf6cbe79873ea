"""WorkerService: turns protobuf into the engine's plans and its events back into protobuf; decides nothing."""

import dataclasses
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, cast

import grpc
from msgspec import structs

from gpu_worker.bridge import Bridge
from gpu_worker.cold.reader import Lookup
from gpu_worker.cold.tier import ColdTier
from gpu_worker.engine.api import (
    AcceptedEvent,
    ChoicePlan,
    Event,
    FinishedEvent,
    Logprob,
    Plan,
    Reason,
    TokensEvent,
    Usage,
)
from gpu_worker.identity import Identity, Meant
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.record import Record, recorded
from gpu_worker.streams import EventStream
from mesh.errors import InvalidRequest, PayloadTooLarge, Unavailable, errors_as_status
from mesh.sampling import from_proto
from mesh.server import AddService, InFlight
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2, worker_pb2_grpc

# The proto promises a sign of life every 250 ms; the rest is for the way.
PROGRESS_S = 0.2
# worker.proto: prompt and emitted ids together.
MAX_IDS = 1_000_000
# Ids in one message: with twenty log-probabilities each it stays far under the message limit.
MESSAGE_IDS = 1024
MOST_ID_CHARACTERS, MOST_SALT_BYTES = 256, 256

Context = grpc.aio.ServicerContext[Any, Any]
NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine. `identity` is set when the engine is ready; before, every call is refused."""

    def __init__(self, bridge: Bridge, cold: ColdTier, in_flight: InFlight, metrics: WorkerMetrics) -> None:
        self.identity: Identity | None = None
        self._bridge = bridge
        self._cold = cold
        self._in_flight = in_flight
        self._metrics = metrics

    def registration(self) -> dict[str, AddService]:
        """For mesh.server.Server."""
        return {NAME: lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)}

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        async with self._in_flight.rpc(context):
            identity = self._own_identity()
            identity.check(meant_of(request))
            plan = plan_of(request)
            with recorded(plan, identity, self._metrics) as record:
                async with self._bridge.generation(plan) as stream:
                    with self._cold.fetching(plan, lambda found: self._submit(stream, found)) as record.lookup:
                        while not stream.drained:
                            events = await stream.take(PROGRESS_S)
                            responses = said(events, record, identity) if events else self._progress(stream, record)
                            for response in responses:
                                yield response

    async def StopChoices(
        self, request: worker_pb2.StopChoicesRequest, context: Context
    ) -> worker_pb2.StopChoicesReply:
        async with errors_as_status(context):
            self._own_identity()
            for stop in request.choices:
                self._bridge.stop_choice(request.request_id, request.attempt, stop.choice, stop.keep_tokens)
        return worker_pb2.StopChoicesReply()

    def _submit(self, stream: EventStream, found: Lookup) -> None:
        """What could be fetched of its KV is there: let the engine run it."""
        fetched, waited_ms = (found.first, found.last), round(found.seconds * 1000)
        self._bridge.submit(stream, structs.replace(stream.plan, fetched=fetched, waited_ms=waited_ms))

    def _own_identity(self) -> Identity:
        if self.identity is None:
            raise Unavailable("the model is still loading", code="not_ready", retry_after_s=1)
        return self.identity

    def _progress(self, stream: EventStream, record: Record) -> list[worker_pb2.GenerateResponse]:
        """A sign of life, unless there is none: a step is overdue."""
        load = self._bridge.load
        if load is None or not self._bridge.well():
            return []
        progress = worker_pb2.Progress(
            engine_steps=load.steps,
            median_step_ms=load.median_step_ms,
            computed_tokens=load.computed.get(stream.request_id, 0),
            phase=_phase(stream, record),
        )
        return [worker_pb2.GenerateResponse(progress=progress)]


def _phase(stream: EventStream, record: Record) -> worker_pb2.Phase.ValueType:
    if not stream.submitted:
        return worker_pb2.PHASE_FETCHING
    if not record.accepted:
        return worker_pb2.PHASE_QUEUED
    return worker_pb2.PHASE_DECODE if record.started else worker_pb2.PHASE_PREFILL


def meant_of(request: worker_pb2.GenerateRequest) -> Meant:
    """Whom the request was meant for."""
    return Meant(
        tokenizer_digest=request.tokenizer_digest,
        worker_id=request.worker_id,
        model=request.meta.model,
        model_digest=request.model_digest,
        precision=request.precision,
        adapter=request.adapter,
        features=tuple(request.required_features),
    )


def plan_of(request: worker_pb2.GenerateRequest) -> Plan:
    """The engine's plan. Raises InvalidRequest on what has no plain form; the engine checks values."""
    if not request.meta.request_id:
        raise InvalidRequest("a request needs an id", field="meta.request_id")
    for name, value, most in (
        ("meta.request_id", request.meta.request_id, MOST_ID_CHARACTERS),
        ("cache_salt", request.cache_salt, MOST_SALT_BYTES),
    ):
        if len(value) > most:
            raise InvalidRequest(f"{name}: {len(value)} are more than {most}", field=name)
    if not request.choices:  # with none the stream would be over before the engine could refuse
        raise InvalidRequest("a request needs at least one choice", field="choices")
    ids = len(request.prompt_ids) + sum(len(choice.emitted_ids) for choice in request.choices)
    if ids > MAX_IDS:
        raise PayloadTooLarge(f"{ids} ids are more than {MAX_IDS}", field="prompt_ids")
    sampling = from_proto(request.sampling)
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=secrets.randbits(64))
    return Plan(
        request_id=request.meta.request_id,
        attempt=request.meta.attempt,
        prompt_ids=list(request.prompt_ids),
        choices=[ChoicePlan(choice.index, list(choice.emitted_ids)) for choice in request.choices],
        sampling=sampling,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
    )


def said(events: list[Event], record: Record, identity: Identity) -> Iterator[worker_pb2.GenerateResponse]:
    """Events as messages, each noted in the record as it leaves."""
    for event in events:
        record.note(event)
        match event:
            case AcceptedEvent():
                yield _accepted(event, identity)
            case TokensEvent():
                yield from _tokens(event)
            case FinishedEvent():
                yield _finished(event)


def _accepted(event: AcceptedEvent, identity: Identity) -> worker_pb2.GenerateResponse:
    accepted = worker_pb2.Accepted(
        cached=_cached(event.cached),
        precision=identity.info.precision,
        model_digest=identity.info.model_digest,
        queue_ms=event.queue_ms,
    )
    return worker_pb2.GenerateResponse(accepted=accepted)


def _tokens(event: TokensEvent) -> Iterator[worker_pb2.GenerateResponse]:
    for at in range(0, len(event.ids), MESSAGE_IDS):
        response = worker_pb2.GenerateResponse()
        tokens = response.tokens  # filled in place: a copied submessage costs more than all the rest
        tokens.choice = event.choice
        tokens.position = event.position + at
        tokens.ids.extend(event.ids[at : at + MESSAGE_IDS])
        if event.logprobs:
            tokens.logprobs.extend(map(_logprob, event.logprobs[at : at + MESSAGE_IDS]))
        yield response


def _logprob(logprob: Logprob) -> types_pb2.TokenLogprob:
    top = [types_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return types_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def _finished(event: FinishedEvent) -> worker_pb2.GenerateResponse:
    finished = worker_pb2.Finished(
        choice=event.choice,
        reason=_REASONS[event.reason],
        completion_tokens=event.completion_tokens,
        stop_token_id=event.stop_token_id,
        usage=_usage(event.usage),
        message=event.message,
    )
    return worker_pb2.GenerateResponse(finished=finished)


_REASONS = {
    Reason.STOP: types_pb2.FINISH_REASON_STOP,
    Reason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Reason.PARKED: types_pb2.FINISH_REASON_PARKED,
    Reason.ERROR: types_pb2.FINISH_REASON_ERROR,
}


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached=_cached(usage.cached),
        recomputed_tokens=usage.recomputed_tokens,
        precision=usage.precision,
        queue_ms=usage.queue_ms,
        first_token_ms=usage.first_token_ms,
        steps=usage.steps,
        median_step_ms=usage.median_step_ms,
        max_step_ms=usage.max_step_ms,
    )


def _cached(cached: Mapping[int, int]) -> list[types_pb2.CachedTokens]:
    """`cached` maps values of KvTier to tokens."""
    found = ((cast("types_pb2.KvTier.ValueType", tier), tokens) for tier, tokens in cached.items())
    return [types_pb2.CachedTokens(tier=tier, tokens=tokens) for tier, tokens in found if tokens]
