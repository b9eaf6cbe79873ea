"""Settings are read once, frozen, and a mistyped variable is said."""

from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from mesh.settings import ModelSettings, ServiceSettings, SettingsError, unknown_variables, variables


class Example(ModelSettings):
    service: ClassVar[str] = "WORKER"
    port: int = Field(50071, ge=0, description="Port.")


class Other(ServiceSettings):
    service: ClassVar[str] = "SCHEDULER"
    port: int = Field(50061, ge=0, description="Port.")


def test_a_services_own_variable_wins_over_the_shared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LOG_LEVEL", "warning")
    assert Example.load().log_level == "warning"
    monkeypatch.setenv("SHOAL_WORKER_LOG_LEVEL", "debug")
    assert Example.load().log_level == "debug"
    assert Other.load().log_level == "warning"


def test_a_field_that_is_not_shared_is_not_read_from_the_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PORT", "1")
    assert Example.load().port == 50071


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example.load().port = 1  # type: ignore[misc]


def test_every_bad_variable_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WORKER_PORT", "many")
    monkeypatch.setenv("SHOAL_WORKER_LOG_LEVEL", "loud")
    with pytest.raises(SettingsError) as caught:
        Example.load()
    assert "SHOAL_WORKER_PORT" in str(caught.value)
    assert "SHOAL_WORKER_LOG_LEVEL" in str(caught.value)
    assert "'many'" in str(caught.value)


def test_an_unknown_variable_is_reported_with_the_nearest_known_one() -> None:
    environ = {"SHOAL_WORKER_PROT": "1", "SHOAL_GATEWAY_ANYTHING": "1", "SHOAL_MODEL": "m", "HOME": "/"}
    (sentence,) = unknown_variables(Example, environ)
    assert "SHOAL_WORKER_PROT" in sentence
    assert "SHOAL_WORKER_PORT" in sentence


def test_every_field_of_every_service_is_documented() -> None:
    for settings in _services():
        assert all(variables(settings).values()), settings
        assert all(name.startswith(f"SHOAL_{settings.service}_") for name in variables(settings))


def _services() -> list[type[ServiceSettings]]:
    from gateway.settings import GatewaySettings
    from gpu_worker.settings import WorkerSettings
    from scheduler.settings import SchedulerSettings

    return [GatewaySettings, SchedulerSettings, WorkerSettings]


def test_every_service_listens_on_loopback_by_default() -> None:
    assert {settings.model_fields["host"].default for settings in _services()} == {"127.0.0.1"}
