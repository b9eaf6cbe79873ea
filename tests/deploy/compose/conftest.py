"""A mesh of containers, built from deploy/ and started once for all tests here. Needs a Docker engine."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import pytest

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
OVERRIDE = Path(__file__).with_name("override.yaml")
REPLICAS = {"gateway": 2, "gpu_worker": 2, "scheduler": 1, "cache_service": 1}
START_S = 300.0
FETCH_METRICS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
# The labels by which Compose, of either version, knows its own.
PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"


def docker(*arguments: str, timeout_s: float = 60) -> str:
    """What a docker command says, on either stream. Fails the test if the command fails."""
    run = subprocess.run(
        ["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    assert run.returncode == 0, f"docker {' '.join(arguments)}: {run.stdout}"
    return run.stdout.strip()


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports on loopback that nobody listens on."""
    for first in range(18000, 32000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


@dataclass(frozen=True, slots=True)
class Container:
    """One container, asked anew at each call. `service` is its name in compose.yaml."""

    id: str
    service: str

    def inspect(self) -> dict:
        return json.loads(docker("inspect", self.id))[0]

    @property
    def health(self) -> str:
        return self.inspect()["State"]["Health"]["Status"]

    def is_well(self) -> bool:
        state = self.inspect()["State"]
        return state["Running"] and state["Health"]["Status"] == "healthy"

    def address(self, port: int) -> str:
        """host:port where a port of the container is published."""
        return docker("port", self.id, str(port)).splitlines()[0]

    @property
    def url(self) -> str:
        return f"http://{self.address(8000)}"

    def crash(self) -> None:
        """SIGKILL to the service below the container's init. Docker restarts a crash, not what it was told to kill."""
        docker("exec", self.id, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after stop_grace_period."""
        docker("stop", self.id)

    def start(self) -> None:
        docker("start", self.id)

    def metric(self, sample: str) -> float:
        """A sample of its own /metrics, by name and labels as written there; 0 if it has none."""
        page = docker("exec", self.id, "python", "-c", FETCH_METRICS)
        return next(
            (float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{sample} ")), 0.0
        )

    def events(self, name: str) -> list[float]:
        """When its log told of an event, seconds since the epoch."""
        lines = [json.loads(line) for line in docker("logs", self.id).splitlines() if line.startswith("{")]
        return [datetime.fromisoformat(line["time"]).timestamp() for line in lines if line.get("event") == name]


class Stack:
    """A compose project with a name and ports of its own."""

    def __init__(self) -> None:
        self.project = f"shoal-test-{os.getpid()}"
        first = free_ports(24)
        self.prometheus = f"http://127.0.0.1:{first + 20}"
        self._env = os.environ | {
            "HTTP_PORTS": f"{first}-{first + 9}",
            "GRPC_PORTS": f"{first + 10}-{first + 19}",
            "PROMETHEUS_PORT": str(first + 20),
            "HEALTH_INTERVAL": "2s",
            "IMAGE_TAG": "test",
        }

    def compose(self, *arguments: str, timeout_s: float = 300) -> None:
        files = ("-f", "compose.yaml", "-f", str(OVERRIDE), "-p", self.project, "--profile", "metrics")
        run = subprocess.run(
            [str(DEPLOY / "compose.sh"), *files, *arguments],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert run.returncode == 0, f"compose {' '.join(arguments)}:\n{run.stdout[-4000:]}"

    def start(self) -> None:
        scale = [part for service, count in REPLICAS.items() for part in ("--scale", f"{service}={count}")]
        self.compose("up", "--detach", "--no-build", *scale)

    def down(self) -> None:
        self.compose("down", "--volumes")

    def containers(self, *services: str) -> list[Container]:
        """All, or those of the services named; also those that stand still."""
        shown = ("--filter", f"label={PROJECT}={self.project}", "--format", f'{{{{.ID}}}} {{{{.Label "{SERVICE}"}}}}')
        found = [Container(*line.split()) for line in docker("ps", "--all", *shown).splitlines()]
        return [container for container in found if not services or container.service in services]

    def left(self) -> list[str]:
        """Containers, volumes and networks that bear the project's name."""
        mine = ("--quiet", "--filter", f"label={PROJECT}={self.project}")
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [found for kind in kinds for found in docker(*kind, *mine).split()]

    @staticmethod
    def in_image(image: str, *command: str) -> str:
        """What a command says in a container of its own, without network."""
        return docker("run", "--rm", "--network", "none", "--entrypoint", command[0], image, *command[1:])

    def tails(self) -> str:
        return "\n".join(f"== {c.service} {c.id}\n{docker('logs', c.id)[-2000:]}" for c in self.containers())


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look at a starting gateway or worker saw: Docker's word, and /ready's status (0 = no answer)."""

    at: float
    container: Container
    health: str
    ready: int = 0


class Watch:
    """Looks at gateways and workers again and again, from their first moment on, in a thread of its own."""

    def __init__(self, stack: Stack) -> None:
        self.sights: list[Sight] = []
        self._stack = stack
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(0.3):
            for container in self._stack.containers("gateway", "gpu_worker"):
                with suppress(AssertionError):  # made, but not started yet
                    self.sights.append(self._look(container))

    @staticmethod
    def _look(container: Container) -> Sight:
        at, ready = time.time(), 0
        if container.service == "gateway":
            with suppress(httpx.HTTPError):
                ready = httpx.get(f"{container.url}/ready", timeout=2).status_code
        return Sight(at, container, container.health, ready)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The running stack, and what was seen while it started."""

    stack: Stack
    sights: tuple[Sight, ...]

    def of(self, service: str) -> list[Container]:
        return self.stack.containers(service)

    def query(self, expression: str) -> list[dict]:
        """What Prometheus answers now: rows of labels and value."""
        asked = {"query": expression.replace("$__rate_interval", "1m")}
        with suppress(httpx.TransportError):  # not up yet
            answer = httpx.get(f"{self.stack.prometheus}/api/v1/query", params=asked, timeout=10).json()
            assert answer["status"] == "success", f"{expression}: {answer}"
            return answer["data"]["result"]
        return []

    def panels(self) -> dict[str, list[str]]:
        """The dashboard's panels: title and expressions."""
        panels = json.loads((DEPLOY / "grafana" / "dashboards" / "shoal.json").read_bytes())["panels"]
        return {panel["title"]: [target["expr"] for target in panel.get("targets", ())] for panel in panels}

    def firing(self) -> list[str]:
        """Names of the alerts that fire."""
        alerts = httpx.get(f"{self.stack.prometheus}/api/v1/alerts", timeout=10).json()["data"]["alerts"]
        return [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"]


def wait_well(stack: Stack, timeout_s: float = START_S) -> None:
    """Until every container of ours is healthy."""
    deadline = time.monotonic() + timeout_s
    while not all(container.is_well() for container in stack.containers(*REPLICAS)):
        if time.monotonic() > deadline:
            pytest.fail(f"not healthy within {timeout_s} s\n{stack.tails()}")
        time.sleep(0.5)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Images built, nothing started; whatever was started is gone afterwards."""
    stack = Stack()
    stack.compose("build", *os.environ.get("COMPOSE_BUILD_ARGS", "").split(), timeout_s=3600)
    yield stack
    stack.down()


@pytest.fixture(scope="session")
def mesh(stack: Stack) -> Mesh:
    """Two gateways and two workers that serve. The workers load at half a core (override.yaml), and then get all."""
    with Watch(stack) as watch:
        stack.start()
        wait_well(stack)
    for worker in stack.containers("gpu_worker"):
        docker("update", "--cpus", str(os.cpu_count()), worker.id)
    return Mesh(stack, tuple(watch.sights))


@pytest.fixture(autouse=True)
def _start_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test stopped runs again, and well, before the next one begins."""
    yield
    if "mesh" not in request.fixturenames:
        return
    stack = request.getfixturevalue("mesh").stack
    for container in stack.containers(*REPLICAS):
        container.start()
    wait_well(stack)
