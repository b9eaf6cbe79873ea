"""Who may call a service inside the mesh: a certificate of the CA is not enough, it must be one with business there.

Health may be asked by any certificate of the CA. Strangers do not get this far: the handshake refuses them.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter

from mesh.errors import PermissionDenied, errors_as_status
from mesh.tls import IDENTITIES, Tls, server_name

OPEN_TO_ALL = "/grpc.health.v1.Health/"

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose fields its stubs do not know
Details = grpc.HandlerCallDetails

log = logging.getLogger("shoal.callers")


def only_from(callers: Iterable[str], tls: Tls | None, registry: CollectorRegistry) -> list[grpc.aio.ServerInterceptor]:
    """The check for a service that takes calls from the identities `callers`; none at all where TLS is off."""
    return [OnlyFrom(callers, registry)] if tls is not None else []


class OnlyFrom(grpc.aio.ServerInterceptor):
    """Ends every other call with PERMISSION_DENIED, before its handler runs."""

    def __init__(self, callers: Iterable[str], registry: CollectorRegistry) -> None:
        self._allowed = {server_name(caller) for caller in callers}
        self._known = {server_name(identity): identity for identity in IDENTITIES}
        self._refused = Counter(
            "shoal_tls_refused_calls",
            "Calls refused because the caller's certificate is of the CA but has no business with this service.",
            ["caller"],
            registry=registry,
        )
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], handler_call_details: Details
    ) -> Handler:
        method = handler_call_details.method
        if method.startswith(OPEN_TO_ALL):
            return await continuation(handler_call_details)
        handler = self._wrapped.get(method)
        if handler is None:
            handler = await continuation(handler_call_details)
            if handler is not None:  # else there is no such method, and names are the caller's: keep none
                handler = self._wrapped[method] = self._guarded(handler, method)
        return handler

    def _guarded(self, handler: Handler, method: str) -> Handler:
        kind = "_".join(
            "stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming)
        )
        inner = getattr(handler, kind)
        if inspect.isasyncgenfunction(inner):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                async with errors_as_status(context):
                    self._check(context, method)
                async with aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        yield response

            return handler._replace(**{kind: stream})
        if inspect.iscoroutinefunction(inner):

            async def answer(request: Any, context: Context) -> Any:
                async with errors_as_status(context):
                    self._check(context, method)
                return await inner(request, context)

            return handler._replace(**{kind: answer})
        raise TypeError(f"{method}: its handler is no coroutine and no async generator, so it cannot be guarded")

    def _check(self, context: Context, method: str) -> None:
        names = {name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())}
        if names & self._allowed:
            return
        caller = min((self._known[name] for name in names & self._known.keys()), default="other")
        self._refused.labels(caller).inc()
        log.warning("refused %s to %s at %s", method, caller, context.peer())
        told = ", ".join(sorted(names)) or "a certificate without a DNS name"
        raise PermissionDenied(f"{told} may not call this service; {', '.join(sorted(self._allowed))} may")
