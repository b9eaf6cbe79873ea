"""The scheduler as a real process: it says where it listens, tells the truth about its health and ends well."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler.settings import SchedulerSettings
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.scheduler.v1 import scheduler_pb2_grpc as rpc

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")},
    "SHOAL_SCHEDULER_PORT": "0",
    "SHOAL_SCHEDULER_QUEU_LIMIT": "7",
}


def start(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scheduler"], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | environment
    )


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with start() as process:
        yield process
        process.kill()


def log_until(process: subprocess.Popen[str], event: str) -> list[dict]:
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if lines[-1].get("event") == event:
            return lines
    pytest.fail(f"it ended without {event}: {lines}")


def test_it_listens_is_serving_and_ends_with_zero_on_sigterm(process) -> None:
    lines = log_until(process, "listening")
    assert any("SHOAL_SCHEDULER_QUEUE_LIMIT" in line["message"] for line in lines), "an unknown variable is not named"
    assert lines[-1]["metrics_port"] > 0
    with grpc.insecure_channel(f"127.0.0.1:{lines[-1]['grpc_port']}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        name = "shoal.scheduler.v1.SchedulerService"
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = rpc.SchedulerServiceStub(channel).WatchLoad(pb.WatchLoadRequest(), timeout=20)
        assert not next(watch).draining
        process.send_signal(signal.SIGTERM)
        assert [load.draining for load in watch][-1]
        assert process.wait(timeout=5) == 0


def test_a_bad_setting_is_named_and_ends_the_process() -> None:
    with start(SHOAL_SCHEDULER_OVERTAKE_SHARE="2") as process:
        _, text = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "SHOAL_SCHEDULER_OVERTAKE_SHARE" in text


@pytest.mark.parametrize("variable", ["SHOAL_SCHEDULER_PORT", "SHOAL_SCHEDULER_METRICS_PORT"])
def test_a_port_that_is_taken_is_named_in_one_line_and_ends_the_process(variable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, start(**{variable: str(other.getsockname()[1])}) as process:
        _, text = process.communicate(timeout=20)
    (line,) = text.splitlines()
    assert process.returncode == 2
    assert f"{variable}: cannot listen" in line


def test_every_setting_is_described_and_reaches_a_policy() -> None:
    assert all(field.description for field in SchedulerSettings.model_fields.values())
    policies = SchedulerSettings(patience_batch_s=7, room_prefill_ms=8, breaker_failures=9, settle_s=1).policies()
    assert policies.queue.patience_s[2] == 7
    assert policies.placement.room_prefill_ms == 8
    assert policies.breaker.failures == 9
    assert policies.absence.settle_s == 1
