"""A mesh of a benchmark's own: in a temporary home, with the pulled model, stopped however the benchmark ends."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from mesh import models
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure
from mesh.child import end_with_parent
from mesh.cli.plan import MeshPlan
from mesh.cli.state import MeshState
from mesh.cli.view import mesh_load
from mesh.errors import InvalidRequest
from shoal.scheduler.v1 import scheduler_pb2

READY_S = 180.0
STOP_S = 60.0
LOOK_EVERY_S = 0.2


class LocalMesh:
    """A running mesh, as its state file tells."""

    def __init__(self, home: Path, supervisor: "subprocess.Popen[bytes]") -> None:
        self.home = home
        self._supervisor = supervisor

    @property
    def state(self) -> MeshState:
        return msgspec.json.decode((self.home / "run" / "mesh.json").read_bytes(), type=MeshState)

    def workers(self) -> list[scheduler_pb2.WorkerState]:
        """Every worker as a scheduler sees it. Raises CannotMeasure if none tells."""
        load = asyncio.run(mesh_load(self.state, timeout_s=5))
        if load is None or not load.workers:
            raise CannotMeasure("no scheduler of the benchmark's mesh tells of a worker")
        return list(load.workers)

    def metrics_port(self, role: str) -> int:
        """Where the first process that plays it serves its metrics."""
        return next(process for process in self.state.processes if process.role == role).ports["metrics"]

    def facts(self) -> dict[str, Any]:
        """Engine, model and precision, by the workers' own words."""
        workers = self.workers()
        hello = workers[0].hello
        return {
            "engine": "simulated" if hello.simulated else "real",
            "model": hello.model,
            "precision": hello.precision,
            "workers": len(workers),
            "gateways": len(self.state.http_urls),
        }

    def wait_ready(self) -> None:
        """Raises CannotMeasure, with the supervisor's words, if the mesh does not come up."""
        deadline = time.monotonic() + READY_S
        while True:
            state = self._state_or_none()
            if state is not None and state.phase == "ready":
                return
            if state is not None and state.phase == "failed":
                raise CannotMeasure(f"the mesh did not start: {state.message}")
            ended = self._supervisor.poll() is not None
            if ended or time.monotonic() > deadline:
                log = (self.home / "supervisor.log").read_text(errors="replace")
                how = "its supervisor ended" if ended else f"not within {READY_S:g} s"
                raise CannotMeasure(f"the mesh did not start ({how}): {log[-1000:]}")
            time.sleep(LOOK_EVERY_S)

    def _state_or_none(self) -> MeshState | None:
        try:
            return self.state
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


@contextmanager
def running(plan: MeshPlan, env: dict[str, str] | None = None) -> Iterator[LocalMesh]:
    """The planned mesh, ready. Raises CannotMeasure if the model is not here or the mesh does not come up."""
    try:
        folder = models.find(plan.model)
    except InvalidRequest as error:
        raise CannotMeasure(error.message) from None
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        home = Path(name)
        _share(home, folder)
        supervisor = _start(plan, home, env or {})
        try:
            mesh = LocalMesh(home, supervisor)
            with bar("starting a mesh", None):
                mesh.wait_ready()
            yield mesh
        finally:
            stop(supervisor)


def _share(home: Path, folder: models.ModelFolder) -> None:
    """What the mesh has of this user's own home: the model."""
    (home / "models").mkdir()
    (home / "models" / folder.name).symlink_to(folder.path)


def _start(plan: MeshPlan, home: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    with (home / "supervisor.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "mesh.cli.daemon", msgspec.json.encode(plan).decode()],
            env=os.environ | {"SHOAL_HOME": str(home)} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def stop(process: "subprocess.Popen[Any]", grace_s: float = STOP_S) -> None:
    """SIGTERM, then SIGKILL for whatever of its family is left."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=2)
    for child in left:
        child.kill()
