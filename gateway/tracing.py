"""The spans of one request: the server's span is the parent, each wait for a grant and each attempt a child.

Contexts are passed to children by hand, not by the ambient one: an answer is an async generator, which may be entered
in one task and left in another. The server's span is ambient nevertheless, for the ids in log lines: a whole call runs
in one task, which attaches and detaches it (over gRPC the interceptor does). Without a collector every span is a no-op
and no attribute is built.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from opentelemetry import context as ambient
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from gateway.request import Request
from mesh.clients.placement import Grant
from mesh.errors import ShoalError
from mesh.telemetry import extract, trace_metadata, tracer

Attributes = Mapping[str, str | int | float | bool | list[str]]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request's server span. `attribute` and `child` cost next to nothing when nobody records."""

    span: Span
    context: Context

    @property
    def recording(self) -> bool:
        return self.span.is_recording()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Log lines of the block carry its ids. Enter and leave it in one task."""
        token = ambient.attach(self.context)
        try:
            yield
        finally:
            ambient.detach(token)

    def attributes(self, attributes: Attributes) -> None:
        """Facts about the whole request."""
        if self.recording:
            self.span.set_attributes(attributes)

    def child(self, name: str) -> "Child":
        """A call to another service; `with` it around the call."""
        span = tracer().start_span(name, context=self.context, kind=SpanKind.CLIENT)
        return Child(span, trace_metadata(trace.set_span_in_context(span, self.context)) if self.recording else ())

    def failed(self, error: ShoalError) -> None:
        """The request ends with `error`."""
        if self.recording:
            self.span.set_attribute("error.type", error.code or type(error).__name__)
            self.span.set_status(Status(StatusCode.ERROR, error.message))

    def finish(self, outcome: str) -> None:
        """How it ended: "ok", "cancelled" or a status."""
        if self.recording:
            self.span.set_attribute("shoal.finish", outcome)

    def end(self, outcome: str) -> None:
        """It is over, and the span is ours to end."""
        self.finish(outcome)
        self.span.end()


@dataclass(frozen=True, slots=True)
class Child:
    """A client span and the W3C metadata that its call must carry."""

    span: Span
    metadata: tuple[tuple[str, str], ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Being cancelled or closed is an end like any other; whoever did it knows why.
        if isinstance(error, Exception) and self.span.is_recording():
            self.span.set_status(Status(StatusCode.ERROR, str(error)))
        self.span.end()


def server_span(name: str, headers: Mapping[str, str]) -> RequestTrace:
    """A span for one HTTP request, below the caller's trace if its headers (lower case) name one. End it yourself."""
    span = tracer().start_span(name, context=extract(headers), kind=SpanKind.SERVER)
    return RequestTrace(span, trace.set_span_in_context(span))


def current_span() -> RequestTrace:
    """The span that the gRPC server's interceptor has opened for this call."""
    span = trace.get_current_span()
    return RequestTrace(span, trace.set_span_in_context(span))


def placed(child: Child, grant: Grant) -> None:
    """Write down why this worker, and who was ahead."""
    if child.span.is_recording():
        child.span.set_attributes(
            {
                "shoal.worker": grant.worker_id,
                "shoal.scheduler": grant.scheduler_id,
                "shoal.attempt": grant.attempt,
                "shoal.queue_wait_ms": grant.waited_ms,
                "shoal.queue_class": grant.queue_class,
                "shoal.ahead": grant.ahead,
                "shoal.reason": grant.reason,
                "shoal.candidates": [f"{worker}: {expected_ms:.0f} ms" for worker, expected_ms in grant.candidates],
            }
        )


def describe(trace: RequestTrace, operation: str, request: Request) -> None:
    """The gen_ai.* attributes (OpenTelemetry's semantic conventions) that a request has before its answer."""
    if trace.recording:
        trace.attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.system": "shoal",
                "gen_ai.request.model": request.model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.response.id": request.request_id,
                "shoal.client_request_id": request.client_request_id,
                "shoal.tenant": request.tenant.name,
                "shoal.priority": request.priority,
                "shoal.prompt_tokens": len(request.prompt_ids),
                "shoal.choices": request.choices,
            }
        )
