"""The two endpoints that generate: from bytes to a validated request, and from the relay's events to bytes."""

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from gateway.core import Core
from gateway.http.bodies import REQUEST_ID_HEADER, ChatBody, CompletionBody
from gateway.http.exchange import BodyLate, ClientGone, Reply, Watch, headers_of, read_body, until_gone
from gateway.http.formats import Format
from gateway.http.problems import parse, plain_error, status_of
from gateway.http.writers import StreamWriter, WholeWriter, Writer
from gateway.request import Asked, Request
from gateway.tenants import Tenant
from gateway.tracing import RequestTrace, describe, server_span
from mesh.errors import Internal, ShoalError

if TYPE_CHECKING:
    import msgspec

log = logging.getLogger("shoal.http")

AnyBody = ChatBody | CompletionBody


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """See GatewaySettings."""

    max_body_bytes: int
    body_timeout_s: float
    sse_commit_s: float
    max_connections: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one route is made of. `name` is its metric label and its gen_ai.operation.name."""

    name: str
    decoder: "msgspec.json.Decoder[AnyBody]"
    form: Callable[[], Format]


class Answering:
    """One generating route as an ASGI application."""

    def __init__(self, core: Core, limits: HttpLimits, endpoint: Endpoint) -> None:
        self._core = core
        self._limits = limits
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        trace = server_span(f"POST {scope['path']}", headers)
        exchange = _Exchange(self._core, self._limits, self._endpoint, trace, Reply(send))
        try:
            with trace.attached():
                await exchange.run(scope, receive, headers)
        except Exception:
            await exchange.broke()
            raise  # the server logs it
        finally:
            self._core.metrics.ended(self._endpoint.name, exchange.outcome)
            trace.end(exchange.outcome)


class _Exchange:
    """One call. `outcome` is "ok", "cancelled" or the status of its error."""

    def __init__(self, core: Core, limits: HttpLimits, endpoint: Endpoint, trace: RequestTrace, reply: Reply) -> None:
        self.outcome = "cancelled"
        self._core = core
        self._limits = limits
        self._endpoint = endpoint
        self._trace = trace
        self._reply = reply

    async def run(self, scope: Scope, receive: Receive, headers: Mapping[str, str]) -> None:
        if (unsupported := _unsupported(scope, headers)) is not None:
            self.outcome = "415"
            await self._reply.whole(415, plain_error(unsupported, "unsupported_media_type"))
            return
        try:
            async with self._core.admitted():
                tenant = self._core.tenants.authenticate(headers.get("authorization"))
                raw = await read_body(scope, receive, self._limits.max_body_bytes, self._limits.body_timeout_s)
                body = parse(self._endpoint.decoder, raw)
                asked = body.asked(headers.get(REQUEST_ID_HEADER, ""))
                silence_s = self._limits.sse_commit_s if body.streamed else None
                work = partial(self._answer, body, asked, tenant)
                await until_gone(Watch(receive, self._reply), silence_s, work)
        except BodyLate as late:
            self.outcome = "408"
            await self._reply.whole(408, plain_error(str(late), "request_timeout"), [(b"connection", b"close")])
        except ShoalError as error:
            await self._fail(error)
        except ClientGone:
            log.debug("the client hung up while sending its body")

    async def _answer(self, body: AnyBody, asked: Asked, tenant: Tenant) -> None:
        """Runs beside the watch for a hang-up, which cancels it; so no ShoalError may leave it."""
        try:
            request = await self._core.validator.request(asked, tenant)
            self._reply.headers.append((b"x-request-id", request.request_id.encode()))
            describe(self._trace, self._endpoint.name, request)
            writer = self._writer(body, request)
            async with aclosing(self._core.relay.answer(request, self._trace)) as events:
                async for event in events:
                    await writer.write(event)
            self.outcome = "ok"
        except ShoalError as error:
            await self._fail(body.named(error))

    def _writer(self, body: AnyBody, request: Request) -> Writer:
        form = self._endpoint.form()
        if body.streamed:
            return StreamWriter(self._reply, form, request, include_usage=body.include_usage)
        return WholeWriter(self._reply, form, request)

    async def broke(self) -> None:
        """A fault of ours, not of the request."""
        if not self._reply.complete:
            await self._fail(Internal("something broke here; it is logged"))

    async def _fail(self, error: ShoalError) -> None:
        self.outcome = str(status_of(error))
        self._trace.failed(error)
        await self._reply.error(error)


def _unsupported(scope: Scope, headers: Mapping[str, str]) -> str | None:
    """Why a body with such headers is not read, if it is not."""
    if not _is_json(headers.get("content-type")):
        return "the body must be JSON: set Content-Type: application/json"
    if (charset := _charset(headers.get("content-type", ""))) not in ("", "utf-8", "us-ascii"):
        return f"the body must be UTF-8: no other charset is supported, and so not {charset}"
    encodings = [value for name, value in scope["headers"] if name == b"content-encoding"]
    if any(value.strip().lower() not in (b"", b"identity") for value in encodings):
        return "the body must be sent as it is: no Content-Encoding but identity is supported"
    return None


def _is_json(content_type: str | None) -> bool:
    """No type at all is taken for JSON."""
    return content_type is None or content_type.partition(";")[0].strip().lower() == "application/json"


def _charset(content_type: str) -> str:
    """The first that the type names, in lower case; empty if it names none."""
    parameters = (each.partition("=") for each in content_type.split(";")[1:])
    named = (value for name, _, value in parameters if name.strip().lower() == "charset")
    return next(named, "").strip().strip('"').lower()
