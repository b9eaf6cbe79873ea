"""How a service's process ends: its exit code, and one line that says why."""

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from mesh.cli.certs import make_set
from mesh.process import ProcessFailed, check_ports, run_service
from mesh.server import Server
from mesh.settings import ServiceSettings, SettingsError
from mesh.telemetry import Telemetry


class Example(ServiceSettings):
    service: ClassVar[str] = "SCHEDULER"
    port: int = Field(0, description="A port.")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A service takes the root logger for itself."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


async def until_stopped(settings: Example, telemetry: Telemetry, stopping: asyncio.Event) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await stopping.wait()


async def lose_everything(settings: Example, telemetry: Telemetry, stopping: asyncio.Event) -> None:
    port = telemetry.serve_metrics()
    async with asyncio.TaskGroup():
        raise ProcessFailed(f"the engine is lost {port}")


def test_a_signal_ends_it_with_zero() -> None:
    assert run_service(Example, lambda _: "here", until_stopped) == 0


def test_a_loss_ends_it_with_one_and_one_line_and_its_metrics_port_is_closed(capsys: pytest.CaptureFixture) -> None:
    assert run_service(Example, lambda _: "here", lose_everything) == 1
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry["message"].startswith("the engine is lost")
    assert "exception" not in entry
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(entry["message"].rpartition(" ")[2])))


def test_a_taken_port_is_named_before_anything_is_started(
    taken: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_METRICS_PORT", str(taken))
    assert run_service(Example, lambda _: "here", lose_everything) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal scheduler: SHOAL_METRICS_PORT: cannot listen on 127.0.0.1:")


def test_one_port_for_two_uses_is_said() -> None:
    with pytest.raises(SettingsError, match="SHOAL_SCHEDULER_PORT: SHOAL_SCHEDULER_METRICS_PORT is 7 already"):
        check_ports(Example(metrics_port=7, port=7))


def test_a_host_that_is_not_ours_is_said() -> None:
    with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1:7000"):
        check_ports(Example(host="192.0.2.1", port=7000))


def test_a_port_taken_after_the_check_ends_it_with_two_all_the_same(taken: int, capsys: pytest.CaptureFixture) -> None:
    async def serve(settings: Example, telemetry: Telemetry, stopping: asyncio.Event) -> None:
        await Server({}).start("127.0.0.1", taken)

    assert run_service(Example, lambda _: "here", serve) == 2
    assert f"127.0.0.1:{taken}" in capsys.readouterr().err


def test_certificates_that_cannot_be_used_are_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_TLS_DIR", str(tmp_path))
    assert run_service(Example, lambda _: "here", lose_everything) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"shoal scheduler: SHOAL_TLS_DIR: {tmp_path}/ca.pem: No such file or directory; `shoal certs` makes a set"
    )


def test_certificates_that_end_soon_are_warned_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    make_set(tmp_path, days=5)
    monkeypatch.setenv("SHOAL_TLS_DIR", str(tmp_path))
    assert run_service(Example, lambda _: "here", until_stopped) == 0
    told = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert any(message.startswith("the certificate in scheduler.pem ends in 5.0 days") for message in told)


def test_metrics_on_a_taken_port_are_a_setting_that_cannot_be_used(taken: int) -> None:
    telemetry = Telemetry(Example(metrics_port=taken), "here")
    with pytest.raises(SettingsError, match="SHOAL_SCHEDULER_METRICS_PORT"):
        telemetry.serve_metrics()
    telemetry.stop()
