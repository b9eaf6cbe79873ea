"""Traces, metrics and logs, set up once per process.

Traces go to an OTLP/gRPC collector when one is named; without one the API's no-op tracer stays and costs nothing. The
request path never waits for the collector: spans pass through a bounded queue that drops when full, and leaving
gives the last batch at most FLUSH_S. Metrics are Prometheus, on a port of the process's own. Logs are one JSON object
a line with the ids of the trace they belong to.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from mesh.settings import ServiceSettings, SettingsError

FLUSH_S = 3.0
EXPORT_TIMEOUT_S = 2.0
# Streams that live as long as the process would be spans without an end.
_UNTRACED_METHODS = ("Attach", "WatchLoad")

log = logging.getLogger("shoal.telemetry")


class Telemetry:
    """What one process reports with. Build once in `__main__`; `stop` when the last request has ended."""

    def __init__(self, settings: ServiceSettings, instance: str, version: str = "0") -> None:
        self.instance = instance
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._settings = settings
        self._service = f"shoal-{settings.service.lower()}"
        self._provider: TracerProvider | None = None
        self._metrics_server: Any = None
        start_logging(settings, self._service, instance)
        if settings.otlp_endpoint:
            self._provider = self._start_tracing(instance, version)

    def _start_tracing(self, instance: str, version: str) -> TracerProvider:
        resource = Resource.create(
            {"service.name": self._service, "service.instance.id": instance, "service.version": version}
        )
        sampler = ParentBased(TraceIdRatioBased(self._settings.trace_ratio))
        provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(
            endpoint=self._settings.otlp_endpoint,
            insecure=not self._settings.otlp_endpoint.startswith("https://"),
            timeout=EXPORT_TIMEOUT_S,
        )
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        trace.set_tracer_provider(provider)
        return provider

    def serve_metrics(self) -> int:
        """Serve /metrics on the settings' host and port; returns the port, which is chosen if the setting is 0.

        Raises SettingsError if it cannot listen there.
        """
        host, port = self._settings.host, self._settings.metrics_port
        try:
            self._metrics_server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            variable = self._settings.variable("metrics_port")
            raise SettingsError(f"{variable}: cannot listen on {host}:{port}: {error.strerror}") from None
        return int(self._metrics_server.server_port)

    def server_interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """A server span for every call that ends; none at all without a collector."""
        if self._provider is None:
            return []
        unwanted = filters.any_of(
            filters.health_check(),
            filters.service_prefix("grpc.reflection"),
            *(filters.method_name(name) for name in _UNTRACED_METHODS),
        )
        interceptor: grpc.aio.ServerInterceptor = aio_server_interceptor(filter_=filters.negate(unwanted))
        return [interceptor]

    def stop(self) -> None:
        """Flush for at most FLUSH_S, collector or not, and close the metrics port."""
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
        if self._provider is None:
            return
        # The exporter retries inside shutdown; a thread that the exit does not wait for keeps the promise.
        flusher = threading.Thread(target=self._provider.shutdown, daemon=True, name="trace-flush")
        flusher.start()
        flusher.join(FLUSH_S)
        if flusher.is_alive():
            log.warning("the trace collector did not answer: spans of the last seconds are lost")


# Finds the process's provider once there is one, and starts no-op spans until then. Asking for it each time costs more
# than such a span.
_TRACER = trace.get_tracer("shoal")
# The headers that can carry a caller's trace.
_CARRIERS = frozenset(propagate.get_global_textmap().fields)


def tracer() -> trace.Tracer:
    """The process's tracer; the no-op one where tracing is off."""
    return _TRACER


def trace_metadata(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """The span of `context` (None = the current one) as W3C `traceparent` gRPC metadata; empty outside a trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return tuple(carrier.items())


def extract(headers: Mapping[str, str]) -> Any:
    """The caller's trace context out of HTTP headers (lower-case names)."""
    return Context() if _CARRIERS.isdisjoint(headers) else propagate.extract(headers)


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, service, instance, logger, message, trace ids, extras."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._base = {"service": service, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._base,
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            entry["trace_id"] = trace.format_trace_id(context.trace_id)
            entry["span_id"] = trace.format_span_id(context.span_id)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry.update(getattr(record, "fields", {}))
        return json.dumps(entry, default=str, ensure_ascii=False)


def start_logging(settings: ServiceSettings, service: str, instance: str) -> None:
    """Log to stderr in the settings' format. Extra fields: `log.info("…", extra={"fields": {...}})`."""
    # What no line of ours tells need not be found out: half of a line's cost (Python's logging HOWTO, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter(service, instance))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {service} %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for noisy in ("httpx", "httpcore", "opentelemetry.exporter.otlp.proto.grpc.exporter"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def milliseconds(buckets: Sequence[float] = ()) -> tuple[float, ...]:
    """Histogram buckets in seconds that suit waits from a millisecond to ten minutes."""
    return tuple(buckets) or (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
    )  # fmt: skip
