"""`shoal up`: start the mesh on this machine, show how it does, stop it on Ctrl-C.

With --detach the same supervisor runs in a process of its own, and this command returns when the mesh is ready.
"""

import os
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from mesh.cli.problem import Problem
from mesh.cli.roles import FEWEST, MOST
from mesh.models import DEFAULT_MODEL

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from mesh.cli.plan import MeshPlan
    from mesh.cli.state import MeshState

LOOK_EVERY_S = 0.2
STOP_SPARE_S = 10.0
INTERRUPTED = 130


class EngineKind(StrEnum):
    """What a worker may run (SHOAL_WORKER_KIND)."""

    TORCH = "torch"
    SIMULATED = "simulated"


class PresetName(StrEnum):
    """What a worker's engine may be tuned for (SHOAL_WORKER_PRESET)."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MIXED = "mixed"


class PolicyName(StrEnum):
    """How a worker's engine may put batches together (SHOAL_WORKER_POLICY)."""

    CONTINUOUS = "continuous"
    STATIC = "static"


Workers = Annotated[int, typer.Option(min=FEWEST["worker"], max=MOST["worker"], help="How many gpu_worker processes.")]
Gateways = Annotated[int, typer.Option(min=FEWEST["gateway"], max=MOST["gateway"], help="How many gateway processes.")]
Schedulers = Annotated[
    int, typer.Option(min=FEWEST["scheduler"], max=MOST["scheduler"], help="How many scheduler processes.")
]
Caches = Annotated[
    int,
    typer.Option(min=FEWEST["cache"], max=MOST["cache"], help="How many cache_service processes; 0 = no shared KV."),
]
Model = Annotated[str, typer.Option(help="Name of a pulled model, or the path of a model folder.")]
Engine = Annotated[
    EngineKind,
    typer.Option(
        envvar="SHOAL_WORKER_KIND",
        help="What the workers run. simulated = no weights, a timing model and random words: for load tests.",
    ),
]
Preset = Annotated[
    PresetName | None,
    typer.Option(envvar="SHOAL_WORKER_PRESET", help="What the workers are tuned for.", show_default="mixed"),
]
Policy = Annotated[
    PolicyName | None,
    typer.Option(
        envvar="SHOAL_WORKER_POLICY",
        help="static = a naive baseline to measure against: padded batches of 8 that end together.",
        show_default="continuous",
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_WORKER_PRECISION",
        help="Number format of the workers' weights.",
        show_default="the workers' own",
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return when the mesh is ready; stop it with `shoal down`.")
]
HttpPort = Annotated[int, typer.Option(min=1, max=65535, help="First HTTP port to try; the next free one is taken.")]
GrpcPort = Annotated[int, typer.Option(min=1, max=65535, help="First gRPC port to try; the next free one is taken.")]
Secure = Annotated[
    bool, typer.Option("--tls", help="TLS everywhere, with the certificates of SHOAL_TLS_DIR, or a set made for it.")
]
Restart = Annotated[bool, typer.Option(help="Start a process again when it dies.")]
Timeout = Annotated[float, typer.Option(help="Seconds the mesh may take to be ready.")]


def command(
    model: Model = DEFAULT_MODEL,
    workers: Workers = 1,
    gateways: Gateways = 1,
    schedulers: Schedulers = 1,
    caches: Caches = 1,
    engine: Engine = EngineKind.TORCH,
    preset: Preset = None,
    policy: Policy = None,
    precision: Precision = "",
    detach: Detach = False,
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 50051,
    tls: Secure = False,
    restart: Restart = True,
    timeout_s: Timeout = 180.0,
) -> None:
    """Start the mesh on this machine: Valkey, cache, scheduler, workers and gateway, as real processes."""
    from mesh.cli import claim
    from mesh.cli.plan import MeshPlan

    lock = claim.take()
    _ensure_model(model)
    plan = MeshPlan(
        model=model,
        engine=engine.value,
        preset=preset.value if preset else "",
        policy=policy.value if policy else "",
        precision=precision,
        workers=workers,
        gateways=gateways,
        schedulers=schedulers,
        caches=caches,
        first_http_port=http_port,
        first_grpc_port=grpc_port,
        restart=restart,
        tls=tls or bool(os.environ.get("SHOAL_TLS_DIR")),
    )
    if plan.tls:
        _ensure_certificates(tls)
    if engine is EngineKind.SIMULATED:
        _tell("SIMULATED: workers compute nothing. Times follow a model (SHOAL_WORKER_SIMULATED_*); words are random.")
    if policy is PolicyName.STATIC:
        _tell("STATIC: workers run padded batches of 8 that end together, a baseline to measure against.")
    if detach:
        _run_detached(plan, timeout_s, lock)
    else:
        _run_here(plan, timeout_s)


def _tell(notice: str) -> None:
    from rich.console import Console

    Console().print(notice, style="yellow", highlight=False, soft_wrap=True)


def _ensure_certificates(make: bool) -> None:
    """Make a set if there is none at all and it was asked for; say so. Whether it is of use, the start tells."""
    from mesh.cli import certs

    folder = certs.default_folder()
    if make and not (folder / "ca.pem").exists():
        certs.make_set(folder)
        typer.echo(f"Made certificates in {folder}, valid for {certs.DAYS} days; `shoal certs --help` tells more.")


def _ensure_model(model: str) -> None:
    """Pull a known model that is not there yet."""
    from mesh import models
    from mesh.cli import pull
    from mesh.errors import InvalidRequest

    try:
        models.find(model)
    except InvalidRequest as error:
        if is_repository(model):
            name = model.partition("/")[2]
            raise Problem(
                f"{model} is not pulled, and there is no such folder",
                f"`shoal pull {model}` fetches that Hugging Face repository; `shoal up --model {name}` then serves it",
            ) from None
        if models.is_path(model):
            raise Problem(error.message) from None
        pull.pull(model)


def is_repository(model: str) -> bool:
    """Whether it reads as org/name rather than as a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model, re.ASCII) is not None and not os.path.exists(model)


def _run_here(plan: "MeshPlan", timeout_s: float) -> None:
    import asyncio

    from mesh.cli import state
    from mesh.cli.foreground import Foreground
    from mesh.cli.ports import PlanError
    from mesh.cli.process import StartFailed
    from mesh.cli.record import record

    record(state.logs_dir() / "supervisor.log")
    try:
        asyncio.run(Foreground(plan, timeout_s).run())
    except (PlanError, StartFailed) as error:
        raise Problem(str(error), "`shoal doctor` checks this machine") from None


def _run_detached(plan: "MeshPlan", timeout_s: float, lock: int) -> None:
    """Start the supervisor in a session of its own, hand it the lock, and wait until it says ready."""
    import subprocess
    import sys

    import msgspec
    from rich.console import Console

    from mesh.cli import state
    from mesh.cli.view import things_to_try

    log = state.logs_dir() / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    state.state_file().unlink(missing_ok=True)
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "mesh.cli.daemon", msgspec.json.encode(plan).decode(), str(lock)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[lock],
        )
    os.close(lock)
    console = Console()
    try:
        with console.status("starting the mesh …") as status:
            mesh = wait_ready(supervisor, timeout_s, lambda words: status.update(words))
    except KeyboardInterrupt:
        typer.echo("\nThe mesh goes on starting in the background: `shoal status` shows it, `shoal down` stops it.")
        raise typer.Exit(INTERRUPTED) from None
    console.print(things_to_try(mesh), highlight=False, markup=False, soft_wrap=True)
    console.print("Running in the background: `shoal status` shows it, `shoal down` stops it.", highlight=False)


def wait_ready(supervisor: "subprocess.Popen[bytes]", timeout_s: float, say: "Callable[[str], None]") -> "MeshState":
    """The mesh, once it stands. Raises Problem, once its supervisor has ended: nothing is in the way of a next try."""
    import time

    from mesh.cli import state

    deadline = time.monotonic() + timeout_s
    stop_s = 0.0
    while time.monotonic() < deadline:
        mesh = state.last()
        if mesh is not None and mesh.supervisor_pid == supervisor.pid:
            stop_s = mesh.stop_s
            if mesh.phase in ("ready", "degraded"):
                return mesh
            if mesh.phase == "failed":
                say("it did not start; stopping what had …")
                _await_end(supervisor, stop_s)
                raise Problem(f"the mesh did not start: {mesh.message}", f"logs: {state.logs_dir()}")
            waiting = [process.name for process in mesh.processes if process.state != "ready"]
            say(f"waiting for {', '.join(waiting)} …")
        if supervisor.poll() is not None:
            log = (state.logs_dir() / "supervisor.log").read_text(errors="replace")
            raise Problem(f"the supervisor ended with {supervisor.returncode}:\n{log[-2000:]}")
        time.sleep(LOOK_EVERY_S)
    supervisor.terminate()
    _await_end(supervisor, stop_s)
    raise Problem(f"the mesh was not ready within {timeout_s:g} s", f"logs: {state.logs_dir()}")


def _await_end(supervisor: "subprocess.Popen[bytes]", stop_s: float) -> None:
    """One that outlasts all its processes' time to stop is left for `shoal down`, which kills it."""
    import subprocess
    from contextlib import suppress

    with suppress(subprocess.TimeoutExpired):
        supervisor.wait(stop_s + STOP_SPARE_S)
