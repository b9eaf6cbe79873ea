"""The HTTP API: routes, and the small answers that need no relay."""

import time
from collections.abc import Mapping

import msgspec
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core import Core
from gateway.http.answering import Answering, Endpoint, HttpLimits
from gateway.http.bodies import ChatBody, CompletionBody
from gateway.http.formats import ChatFormat, CompletionFormat
from gateway.http.problems import error_body, error_headers, plain_error, status_of
from gateway.metrics import Metrics
from mesh.clients.load import ModelView
from mesh.errors import Internal, ShoalError

_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(core: Core, limits: HttpLimits) -> "Front":
    """The whole HTTP API over `core`."""
    plain = _Plain(core)
    chat = Endpoint("chat", msgspec.json.Decoder(ChatBody), ChatFormat)
    completion = Endpoint("text_completion", msgspec.json.Decoder(CompletionBody), CompletionFormat)
    generating: dict[str, ASGIApp] = {
        "/v1/chat/completions": Answering(core, limits, chat),
        "/v1/completions": Answering(core, limits, completion),
    }
    app = Starlette(
        routes=[
            *(Route(path, answering, methods=["POST"]) for path, answering in generating.items()),
            Route("/v1/models", plain.models),
            Route("/v1/models/{name:path}", plain.model),
            Route("/health", plain.health),
            Route("/ready", plain.ready),
            Route("/metrics", plain.metrics),
        ],
        exception_handlers={HTTPException: _http_problem, ShoalError: _problem, Exception: _bug},
    )
    app.router.redirect_slashes = False  # it would send a client to whatever its Host header says
    return Front(generating, app, limits, core.metrics)


class Front:
    """What the server calls, and what it needs to know: `limits`, and where to count what it refused itself.

    Takes what generates straight to its endpoint, past Starlette's layers: each of them would handle every chunk of
    a stream once more (3 us a token), to no end, since an endpoint tells its errors itself.
    """

    def __init__(self, generating: Mapping[str, ASGIApp], app: ASGIApp, limits: HttpLimits, metrics: Metrics) -> None:
        self.limits = limits
        self._generating = generating
        self._app = app
        self._metrics = metrics

    def refused(self, status: int) -> None:
        """A connection was refused or cut with `status` before a request of it was whole."""
        self._metrics.ended("connection", str(status))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        straight = self._generating.get(scope["path"]) if scope["method"] == "POST" else None
        await (straight or self._app)(scope, receive, send)


class _Plain:
    """Answers from what is known already."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._started_unix_s = int(time.time())

    async def health(self, request: Request) -> Response:
        """Liveness: this process answers."""
        return _json(200, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The truth: a request sent now would find a scheduler and a worker."""
        missing = self._core.missing
        if missing:
            return _json(503, {"ready": False, "missing": missing}, {"retry-after": "1"})
        return _json(200, {"ready": True, "models": sorted(self._core.catalogue.serving())})

    async def metrics(self, request: Request) -> Response:
        """Only where nobody has a key to be kept from; the process's metrics port has them always."""
        if not self._core.tenants.open_to_all:
            raise HTTPException(404)
        return Response(generate_latest(self._core.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The models that at least one worker serves now."""
        self._core.tenants.authenticate(request.headers.get("authorization"))
        views = self._core.catalogue.serving()
        return _json(200, {"object": "list", "data": [self._entry(views[name]) for name in sorted(views)]})

    async def model(self, request: Request) -> Response:
        self._core.tenants.authenticate(request.headers.get("authorization"))
        name = request.path_params["name"]
        view = self._core.catalogue.serving().get(name)
        if view is None:
            message = f"no worker serves the model {name!r} now"
            return Response(plain_error(message, "model_not_found"), 404, media_type="application/json")
        return _json(200, self._entry(view))

    def _entry(self, view: ModelView) -> dict[str, object]:
        return {
            "id": view.name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "shoal",
            "context_tokens": view.context_tokens,
            "workers": view.workers,
            "simulated": view.simulated,
        }


def _json(status: int, value: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def _http_problem(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = plain_error(message, _CODES.get(error.status_code, "http_error"))
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _problem(request: Request, error: Exception) -> Response:
    if not isinstance(error, ShoalError):
        raise error
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), status_of(error), headers, media_type="application/json")


async def _bug(request: Request, error: Exception) -> Response:
    """A fault of ours; the server logs it."""
    return Response(error_body(Internal("something broke here; it is logged")), 500, media_type="application/json")
