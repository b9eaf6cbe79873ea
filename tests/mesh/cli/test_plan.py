"""The plan of a local mesh: processes with ports and variables of their own, at the start and when it is scaled."""

import os
import socket
from pathlib import Path

import pytest

from mesh.cli import targets
from mesh.cli.plan import FIRST_PORTS, Layout, MeshPlan
from mesh.cli.ports import PlanError, Ports
from mesh.cli.roles import Change
from mesh.discovery import Targets
from mesh.models import DEFAULT_MODEL

PLAN = MeshPlan(model=DEFAULT_MODEL, workers=3, gateways=2, schedulers=2, caches=2)


def test_a_plan_gives_every_process_ports_of_its_own_and_starts_what_others_stand_on_first() -> None:
    specs = Layout(PLAN).first()
    ports = [port for spec in specs for port in spec.ports.values()]
    assert len(set(ports)) == len(ports)
    roles = ["valkey"] + ["cache"] * 2 + ["scheduler"] * 2 + ["worker"] * 3 + ["gateway"] * 2
    assert [spec.role for spec in specs] == roles
    assert all("metrics" in spec.ports for spec in specs if spec.role != "valkey")


def test_workers_are_told_what_was_chosen_and_keep_their_own_where_nothing_was() -> None:
    def told(**chosen: str) -> dict[str, str]:
        specs = Layout(MeshPlan(model=DEFAULT_MODEL, **chosen)).first()
        [env] = [spec.env for spec in specs if spec.role == "worker"]
        names = ("PRESET", "POLICY", "PRECISION")
        return {name: env[f"SHOAL_WORKER_{name}"] for name in names if f"SHOAL_WORKER_{name}" in env}

    assert told() == {}
    assert told(preset="latency", policy="static") == {"PRESET": "latency", "POLICY": "static"}
    assert told(precision="bf16") == {"PRECISION": "bf16"}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports where no mesh looks: one that starts or stops meanwhile would change which come next."""
    for role, ports in FIRST_PORTS.items():
        monkeypatch.setitem(FIRST_PORTS, role, {use: first + 12_000 for use, first in ports.items()})


@pytest.mark.usefixtures("apart")
def test_what_is_added_has_new_ports_and_what_is_gone_gives_its_own_back() -> None:
    layout = Layout(PLAN)
    first = layout.first()
    added = layout.more([Change("worker", added=(3, 4)), Change("cache", added=(2,))], 5)
    assert [spec.name for spec in added] == ["worker-3", "worker-4", "cache-2"]
    taken = {port for spec in first for port in spec.ports.values()}
    assert taken.isdisjoint(port for spec in added for port in spec.ports.values())
    layout.forget(added)
    assert layout.more([Change("cache", added=(2,))], 3)[0].ports == added[2].ports


@pytest.mark.usefixtures("apart")
def test_a_plan_that_lacks_a_port_takes_none() -> None:
    layout = Layout(MeshPlan(model=DEFAULT_MODEL, first_http_port=65535))
    layout.first()
    worker = Change("worker", added=(1,))
    before = layout.more([worker], 2)
    layout.forget(before)
    with pytest.raises(PlanError, match="from 65535 to 65535"):
        layout.more([worker, Change("gateway", added=(1,))], 2)
    assert layout.more([worker], 2)[0].ports == before[0].ports


def test_two_meshes_are_never_given_the_same_port_though_nobody_listens_yet() -> None:
    one, other = Ports(), Ports()
    first = one.from_(23_000)
    assert other.from_(first) > first
    one.release([first])
    assert other.from_(first) == first
    del other
    assert one.from_(first) == first


def test_a_new_worker_takes_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_WORKER_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    layout = Layout(PLAN)
    threads = [spec.env["SHOAL_WORKER_THREADS"] for spec in layout.first() if spec.role == "worker"]
    assert threads == ["2"] * 3
    [more] = layout.more([Change("worker", added=(9,))], 10)
    assert more.env["SHOAL_WORKER_THREADS"] == "1"


def test_peers_are_found_through_files_wherever_the_home_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "a home, with # and %20"))
    specs = Layout(PLAN).first()
    for role, name in (("worker", targets.WORKER_SCHEDULERS), ("gateway", targets.GATEWAY_SCHEDULERS)):
        [where] = {spec.env["SHOAL_SCHEDULERS"] for spec in specs if spec.role == role}
        read = Targets(where)
        targets.write(name, ["127.0.0.1:1", "127.0.0.1:2"])
        assert read.pairs() == [("127.0.0.1", 1), ("127.0.0.1", 2)]
        targets.write(name, [])
        assert read.pairs() == []


def test_a_port_in_use_is_passed_over_and_none_left_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert Ports().from_(port) != port
    with pytest.raises(PlanError, match="no free port"):
        Ports().from_(65536)


@pytest.mark.usefixtures("apart")
def test_a_process_whose_port_was_taken_meanwhile_keeps_its_others_and_is_told_the_new_one() -> None:
    layout = Layout(PLAN)
    spec = next(spec for spec in layout.first() if spec.role == "scheduler")
    with socket.create_server(("127.0.0.1", spec.ports["grpc"])):
        moved = layout.moved(spec)
    assert moved.ports["grpc"] != spec.ports["grpc"]
    assert moved.ports["metrics"] == spec.ports["metrics"]
    assert moved.env == spec.env | {"SHOAL_SCHEDULER_PORT": str(moved.ports["grpc"])}
    layout.forget([moved])
