"""What a server answers to bytes that are no message: INVALID_ARGUMENT and a reason.

gRPC itself says UNKNOWN, and logs a traceback for each such call: anybody who reaches the port could fill the log.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mesh.errors import InvalidRequest, errors_as_status

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose fields its stubs do not know
Details = grpc.HandlerCallDetails


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands where the request would: gRPC reads a single request before there is a handler to raise in."""

    error: InvalidRequest


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """The innermost interceptor, so that a span around the call sees how it ended."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        method = handler_call_details.method
        handler = self._wrapped.get(method)
        if handler is None:
            handler = await continuation(handler_call_details)
            if handler is not None:  # else there is no such method, and names are the caller's: keep none
                handler = self._wrapped[method] = _wrap(handler)
        return handler


def _wrap(handler: Handler) -> Handler:
    """The same handler, its reading guarded. One that is no coroutine and no async generator stays as it is."""
    kind = "_".join("stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming))
    inner, deserialize = getattr(handler, kind), handler.request_deserializer
    if inspect.isasyncgenfunction(inner):
        behaviour: Callable[[Any, Context], Any] = _streaming(inner)
    elif inspect.iscoroutinefunction(inner):
        behaviour = _answering(inner)
    else:
        return handler
    # A stream's messages are read inside its handler, where reading may raise.
    read = _guarded(deserialize) if handler.request_streaming else _marking(_guarded(deserialize))
    return handler._replace(request_deserializer=read, **{kind: behaviour})


def _guarded(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Raises InvalidRequest where `deserialize`, a message class's FromString, raises DecodeError."""
    message = getattr(deserialize, "__self__", None)
    name = message.DESCRIPTOR.full_name if message is not None else "request"

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            raise InvalidRequest(f"the message is not a valid {name}") from None

    return read


def _marking(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read_or_mark(raw: bytes) -> Any:
        try:
            return read(raw)
        except InvalidRequest as error:
            return _Malformed(error)

    return read_or_mark


def _answering(inner: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def behaviour(request: Any, context: Context) -> Any:
        async with errors_as_status(context):
            _check(request)
            return await inner(request, context)

    return behaviour


def _streaming(inner: Callable[[Any, Context], Any]) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def behaviour(request: Any, context: Context) -> AsyncIterator[Any]:
        async with errors_as_status(context):
            _check(request)
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response

    return behaviour


def _check(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise request.error
