"""Telemetry observes and never gets in the way: no collector, a silent one, and one that listens."""

import json
import logging
import socket
import subprocess
import sys
import time
from typing import ClassVar

import httpx
import pytest

from mesh.settings import ServiceSettings
from mesh.telemetry import JsonFormatter, Telemetry, trace_metadata, tracer


class Example(ServiceSettings):
    service: ClassVar[str] = "SCHEDULER"


def test_without_a_collector_there_are_no_spans_and_no_interceptors() -> None:
    telemetry = Telemetry(Example.load(), "here")
    assert telemetry.server_interceptors() == []
    with tracer().start_as_current_span("nothing") as span:
        assert not span.is_recording()
        assert trace_metadata() == ()
    telemetry.stop()


def test_metrics_are_served_on_a_port_of_their_own() -> None:
    from prometheus_client import Counter

    telemetry = Telemetry(Example.load(), "here")
    Counter("shoal_example", "An example.", registry=telemetry.registry).inc()
    port = telemetry.serve_metrics()
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    telemetry.stop()
    assert "shoal_example_total 1.0" in text


def test_a_log_line_is_one_json_object_with_its_fields() -> None:
    record = logging.LogRecord("shoal.x", logging.INFO, "f.py", 1, "worker %s", ("w1",), None)
    record.fields = {"event": "listening", "port": 7}
    entry = json.loads(JsonFormatter("shoal-scheduler", "s1").format(record))
    assert entry["message"] == "worker w1"
    assert entry["service"] == "shoal-scheduler"
    assert (entry["event"], entry["port"]) == ("listening", 7)


PROGRAM = """
import sys, time
from typing import ClassVar
from mesh.settings import ServiceSettings
from mesh.telemetry import Telemetry, tracer, trace_metadata

class Example(ServiceSettings):
    service: ClassVar[str] = "SCHEDULER"

telemetry = Telemetry(Example.load(otlp_endpoint=sys.argv[1]), "here")
began = time.perf_counter()
for _ in range(1000):
    with tracer().start_as_current_span("request"):
        assert trace_metadata()[0][0] == "traceparent"
print(time.perf_counter() - began)
began = time.perf_counter()
telemetry.stop()
print(time.perf_counter() - began)
"""


@pytest.mark.parametrize("collector", ["absent", "silent"])
def test_a_collector_that_does_not_answer_slows_neither_requests_nor_the_exit(collector: str) -> None:
    """B23: a thousand spans, then the end, against a closed port and against one that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if collector == "absent":
            listener.close()
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{port}"], capture_output=True, text=True, timeout=60
        )
        total_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    requests_s, flush_s = map(float, done.stdout.split())
    assert requests_s < 1.0
    assert flush_s < 5.0
    assert total_s < 15.0
