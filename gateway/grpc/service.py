"""InferenceService: turns protobuf into requests and events back into protobuf; decides nothing."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import grpc

from gateway.core import Core
from gateway.grpc.messages import asked_to_chat, asked_to_generate, response_of
from gateway.request import Asked
from gateway.tenants import Tenant
from gateway.tracing import RequestTrace, current_span, describe
from mesh.errors import InvalidRequest, PayloadTooLarge, ShoalError, errors_as_status, kind_of
from shoal.channel import MAX_MESSAGE_BYTES, ChannelOptions
from shoal.gateway.v1 import gateway_pb2, gateway_pb2_grpc

SERVICE = "shoal.gateway.v1.InferenceService"
Context = grpc.aio.ServicerContext[Any, Any]
Message = TypeVar("Message", gateway_pb2.GenerateRequest, gateway_pb2.ChatRequest, gateway_pb2.CountTokensRequest)


def receiving(most_bytes: int) -> ChannelOptions:
    """Of a server whose largest request has `most_bytes`: it takes some more, which the service refuses by its code.
    What is larger still gRPC refuses, without details.
    """
    return (("grpc.max_receive_message_length", most_bytes + MAX_MESSAGE_BYTES),)


class InferenceService(gateway_pb2_grpc.InferenceServiceServicer):
    """The public gRPC API over the same core as the HTTP one. A client that reads nothing for `write_timeout_s` while
    its window is full is cut off. `most_bytes` is the largest request.
    """

    def __init__(self, core: Core, write_timeout_s: float, most_bytes: int) -> None:
        self._core = core
        self._write_timeout_s = write_timeout_s
        self._most_bytes = most_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        async with (
            self._call("grpc_generate", context) as (tenant, trace),
            aclosing(self._answer(asked_to_generate(self._fitting(request)), tenant, trace, context)) as responses,
        ):
            async for response in _until_unread(responses, self._write_timeout_s):
                yield response

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        async with (
            self._call("grpc_chat", context) as (tenant, trace),
            aclosing(self._answer(asked_to_chat(self._fitting(request)), tenant, trace, context)) as responses,
        ):
            async for response in _until_unread(responses, self._write_timeout_s):
                yield response

    async def CountTokens(
        self, request: gateway_pb2.CountTokensRequest, context: Context
    ) -> gateway_pb2.CountTokensResponse:
        async with errors_as_status(context), self._core.admitted():
            self._tenant(context)
            asked = _asked(self._fitting(request))
            prompt_tokens = await self._core.validator.count(asked, context.time_remaining())
        context_tokens = self._core.catalogue.context_tokens(asked.model)
        return gateway_pb2.CountTokensResponse(prompt_tokens=prompt_tokens, context_tokens=context_tokens)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        async with errors_as_status(context):
            self._tenant(context)
        views = self._core.catalogue.serving()
        return gateway_pb2.ListModelsResponse(
            models=[
                gateway_pb2.Model(
                    name=view.name,
                    context_tokens=view.context_tokens,
                    workers=view.workers,
                    simulated=view.simulated,
                )
                for _, view in sorted(views.items())
            ]
        )

    def _fitting(self, request: Message) -> Message:
        """The same. Raises PayloadTooLarge."""
        if request.ByteSize() > self._most_bytes:
            raise PayloadTooLarge(f"the request is larger than {self._most_bytes} bytes")
        return request

    def _tenant(self, context: Context) -> Tenant:
        metadata = {key: value for key, value in context.invocation_metadata() or ()}
        authorization = metadata.get("authorization")
        return self._core.tenants.authenticate(authorization if isinstance(authorization, str) else None)

    @asynccontextmanager
    async def _call(self, route: str, context: Context) -> AsyncIterator[tuple[Tenant, RequestTrace]]:
        """Around one generating call: admission, who asks, and how it ended for metrics, trace and status."""
        trace = current_span()
        outcome = "cancelled"
        try:
            async with errors_as_status(context):
                try:
                    async with self._core.admitted():
                        yield self._tenant(context), trace
                    outcome = "ok"
                except ShoalError as error:
                    outcome = str(kind_of(error).http)
                    trace.failed(error)
                    raise
        finally:
            self._core.metrics.ended(route, outcome)
            trace.finish(outcome)

    async def _answer(
        self, asked: Asked, tenant: Tenant, trace: RequestTrace, context: Context
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        request = await self._core.validator.request(asked, tenant, context.time_remaining())
        describe(trace, asked.route.value, request)
        async with aclosing(self._core.relay.answer(request, trace)) as events:
            async for event in events:
                yield response_of(event, request)


async def _until_unread(
    responses: AsyncIterator[gateway_pb2.GenerateResponse], timeout_s: float
) -> AsyncIterator[gateway_pb2.GenerateResponse]:
    """The same, but what is not taken within `timeout_s` cancels the call: gRPC itself waits for ever to send it."""
    loop, call = asyncio.get_running_loop(), asyncio.current_task()
    if call is None:
        raise RuntimeError("a call outside of any task")
    async for response in responses:
        alarm = loop.call_later(timeout_s, call.cancel)
        try:
            yield response
        finally:
            alarm.cancel()


def _asked(request: gateway_pb2.CountTokensRequest) -> Asked:
    kind = request.WhichOneof("of")
    if kind is None:
        raise InvalidRequest("give generate or chat", field="of")
    return asked_to_chat(request.chat) if kind == "chat" else asked_to_generate(request.generate)
