"""The cache service as a real process: it says where it listens, is ready while Redis answers, and ends well."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cache_service.settings import CacheSettings
from mesh.kv import Bundle, KvGeometry
from mesh.kv_wire import PIECE_BYTES, header_of
from mesh.settings import SettingsError
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc


@contextmanager
def start(**environment: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environment = inherited | {"SHOAL_CACHE_PORT": "0"} | environment
    with subprocess.Popen(
        [sys.executable, "-m", "cache_service"], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def log_until(process: subprocess.Popen[str], event: str) -> dict:
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if lines[-1].get("event") == event:
            return lines[-1]
    pytest.fail(f"it ended without {event}: {lines}")


def test_it_listens_is_ready_while_redis_answers_and_ends_with_zero_on_sigterm(valkey) -> None:
    with start(SHOAL_CACHE_REDIS_URL=valkey) as process:
        told = log_until(process, "listening")
        with grpc.insecure_channel(f"127.0.0.1:{told['grpc_port']}") as channel:
            request = health_pb2.HealthCheckRequest(service="shoal.cache.v1.CacheService")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=20)
            assert any(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in watch)
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            assert stub.Stats(cache_pb2.StatsRequest(), timeout=5) == cache_pb2.StatsReply()
            with urllib.request.urlopen(f"http://127.0.0.1:{told['metrics_port']}/metrics", timeout=5) as page:
                assert "shoal_cache_redis_up 1.0" in page.read().decode()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=10) == 0


def endless(over: threading.Event) -> Iterator[cache_pb2.Chunk]:
    """The largest bundle that is taken, piece by piece, and never its last one."""
    shape = KvGeometry("fp16", block_tokens=16, layers=256, kv_heads=64, head_dim=64)
    header = header_of(Bundle(b"k" * 16, b"n" * 16, shape, b"", 0))
    for offset in range(0, shape.bundle_bytes - PIECE_BYTES, PIECE_BYTES):
        yield cache_pb2.Chunk(header=None if offset else header, offset=offset, payload=bytes(PIECE_BYTES))
    over.wait(20)


def test_many_that_send_without_end_cannot_fill_its_memory(valkey) -> None:
    over = threading.Event()
    with start(SHOAL_CACHE_REDIS_URL=valkey, SHOAL_CACHE_STALL_S="2") as process, ExitStack() as channels:
        channels.callback(over.set)
        port = log_until(process, "listening")["grpc_port"]
        stubs = [
            cache_pb2_grpc.CacheServiceStub(
                channels.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", (("number", number),)))
            )
            for number in range(4)
        ]
        calls = [stubs[number % 4].Put.future(endless(over), timeout=30) for number in range(120)]
        codes = {call.code() for call in calls}
        assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert psutil.Process(process.pid).memory_info().rss < 800 * 2**20


def test_it_serves_misses_without_redis_and_says_why() -> None:
    with start(SHOAL_CACHE_REDIS_URL="redis://127.0.0.1:1/0") as process:
        assert log_until(process, "redis_away")["level"] == "warning"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("redis_url", "http://127.0.0.1:6379"),
        ("redis_url", "127.0.0.1:6379"),
        ("redis_timeout_s", "0"),
        ("ttl_s", "0"),
        ("max_bundle_bytes", str(2**40)),
        ("held_bytes", "1"),
    ],
)
def test_a_bad_setting_is_named(monkeypatch, name, value) -> None:
    monkeypatch.setenv(f"SHOAL_CACHE_{name.upper()}", value)
    with pytest.raises(SettingsError, match=f"SHOAL_CACHE_{name.upper()}"):
        CacheSettings.load()


def test_every_setting_is_described() -> None:
    assert all(field.description for field in CacheSettings.model_fields.values())
