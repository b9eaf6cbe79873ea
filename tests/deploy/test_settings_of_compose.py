"""compose.yaml and .env set what the services read, all of it, and nothing else: what pydantic would not notice."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from cache_service.settings import CacheSettings
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from mesh.server import CLOSE_S
from mesh.settings import SHARED_FIELDS, ModelSettings, ServiceSettings
from mesh.telemetry import FLUSH_S
from scheduler.settings import SchedulerSettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
OURS = ("gateway", "scheduler", "gpu_worker", "cache_service")
# Where .env means something else than the code's default, which is made for one machine without containers.
OTHERWISE = {"SHOAL_GATEWAY_ALLOW_ANONYMOUS": True}


def env_file() -> dict[str, str]:
    lines = (DEPLOY / ".env").read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if line and not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs), "a variable is there twice"
    return {name: value for name, value in pairs}


ENV = env_file()
SET_BY_COMPOSE = {name for service in OURS for name in SERVICES[service].get("environment", {})}


def settings() -> dict[str, tuple[type[ServiceSettings], str]]:
    """Every variable of docs/settings.md with its class and field."""
    found: dict[str, tuple[type[ServiceSettings], str]] = {
        f"SHOAL_{name.upper()}": (ModelSettings, name) for name in SHARED_FIELDS
    }
    for kind in (GatewaySettings, SchedulerSettings, WorkerSettings, CacheSettings):
        own = kind.model_fields.keys() - SHARED_FIELDS
        found |= {f"SHOAL_{kind.service}_{name.upper()}": (kind, name) for name in own}
    return found


SETTINGS = settings()


def test_every_setting_is_in_the_env_file_or_in_compose_and_in_one_of_them_only() -> None:
    missing = SETTINGS.keys() - ENV.keys() - SET_BY_COMPOSE
    lines = [
        f"# {SETTINGS[name][0].model_fields[SETTINGS[name][1]].description}\n"
        f"{name}={SETTINGS[name][0].model_fields[SETTINGS[name][1]].default}\n"
        for name in sorted(missing)
    ]
    assert not missing, "add to deploy/.env:\n\n" + "\n".join(lines)
    assert not ENV.keys() & SET_BY_COMPOSE, "compose.yaml wins, so a line of .env would do nothing"


def test_no_variable_is_set_that_nothing_reads() -> None:
    ours = {name for name in ENV.keys() | SET_BY_COMPOSE if name.startswith("SHOAL_")}
    assert not ours - SETTINGS.keys()


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() & ENV.keys()))
def test_the_env_file_holds_the_default(name: str) -> None:
    kind, field_name = SETTINGS[name]
    field = kind.model_fields[field_name]
    value = TypeAdapter(field.annotation).validate_python(ENV[name])
    assert value == OTHERWISE.get(name, field.default)


def test_what_belongs_to_containers_is_in_the_env_file_with_composes_own_default() -> None:
    """So that compose.yaml works without .env's first part, and nothing there is without effect."""
    asked = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE))
    assert not re.findall(r"\$\{\w+[^\w:]", COMPOSE), "a variable without a default"
    own = {name: value for name, value in ENV.items() if not name.startswith(("SHOAL_", "COMPOSE_"))}
    assert own == asked | {"PULL_MODELS": own["PULL_MODELS"]}


@pytest.mark.parametrize("service", OURS)
def test_a_service_asks_its_own_health_at_the_port_that_it_is_given(service: str) -> None:
    prefix = {"gateway": "GATEWAY_GRPC", "gpu_worker": "WORKER", "cache_service": "CACHE", "scheduler": "SCHEDULER"}
    port = SERVICES[service]["environment"][f"SHOAL_{prefix[service]}_PORT"]
    assert SERVICES[service]["healthcheck"]["test"] == ["CMD", "python", "-m", "mesh.probe", f"127.0.0.1:{port}"]


def test_time_budgets_nest_inside_dockers_kill_timer() -> None:
    """Fault B21: drain, then cut, close and flush, and time to spare, before SIGKILL."""
    inner = float(ENV["SHOAL_DRAIN_S"]) + float(ENV["SHOAL_GATEWAY_CUT_S"]) + CLOSE_S + FLUSH_S
    grace_s = float(ENV["STOP_GRACE"].removesuffix("s"))
    assert inner + 5 <= grace_s
    assert float(ENV["SHOAL_WORKER_PARK_S"]) < float(ENV["SHOAL_DRAIN_S"])
    assert all("STOP_GRACE" in SERVICES[service]["stop_grace_period"] for service in OURS)


def test_starting_waits_for_nothing_that_may_never_come() -> None:
    """Fault B22: only the one-shot is waited for; a circle, or the health of what others wait for, would deadlock."""
    after = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    conditions = {
        (name, one["condition"]) for needs in after.values() if isinstance(needs, dict) for name, one in needs.items()
    }
    assert {name for name, condition in conditions if condition != "service_started"} == {"model"}
    done: set[str] = set()
    while ready := [name for name in after if name not in done and done.issuperset(after[name])]:
        done.update(ready)
    assert done == after.keys(), "a circle"


def test_ports_are_published_on_loopback_and_scaled_services_have_ranges() -> None:
    assert ENV["BIND_ADDRESS"] == "127.0.0.1"
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("${BIND_ADDRESS:-127.0.0.1}:") for port in published)
    for name in ("HTTP_PORTS", "GRPC_PORTS"):
        first, last = map(int, ENV[name].split("-"))
        assert last - first >= 9


@pytest.mark.parametrize("service", OURS)
def test_a_service_heals_obeys_signals_and_holds_no_privileges(service: str) -> None:
    given = SERVICES[service]
    assert (given["restart"], given["init"], given["cap_drop"]) == ("unless-stopped", True, ["ALL"])
    assert given["mem_limit"]
