"""What `shoal up` leaves on disk so that `shoal status`, `chat` and `down` find the running mesh.

One JSON file under the cache folder, replaced as a whole. A file whose supervisor is gone counts as no mesh at all.
"""

import os
from pathlib import Path

import msgspec
import psutil

from mesh.models import cache_dir


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the mesh. `state` is starting, ready, restarting, stopping, stopped or failed.

    `since` is the Unix time of that; `why` says how it last ended; empty once it is ready again.
    """

    role: str
    index: int
    pid: int | None
    state: str
    restarts: int
    ports: dict[str, int]
    log: str
    since: float = 0.0
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class MeshState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole local mesh. `phase` is starting, ready, degraded, stopping or failed; `message` says why it failed.

    It is degraded when it has been ready and not every process is now, those that come or go by scaling left aside.
    Urls and addresses are of processes that may be turned to; `processes` are all. `model` is the name that clients
    ask for, `notices` what the user should be told once, a sentence each.
    """

    supervisor_pid: int
    supervisor_created: float  # psutil's create_time: tells this process from a later one with its pid
    phase: str
    model: str
    http_urls: list[str]
    grpc_addresses: list[str]
    scheduler_addresses: list[str]
    processes: list[ProcessState]
    message: str = ""
    notices: list[str] = []
    tls_dir: str = ""  # the certificates' folder; empty without TLS
    stop_s: float = 0.0  # most seconds that stopping it takes

    @property
    def http_url(self) -> str:
        return self.http_urls[0]

    @property
    def grpc_address(self) -> str:
        return self.grpc_addresses[0]

    def supervisor(self) -> psutil.Process | None:
        """The supervisor, if it still runs."""
        try:
            process = psutil.Process(self.supervisor_pid)
            same = abs(process.create_time() - self.supervisor_created) < 1
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def run_dir() -> Path:
    """Where the local mesh keeps its state and logs."""
    return cache_dir() / "run"


def logs_dir() -> Path:
    return run_dir() / "logs"


def state_file() -> Path:
    return run_dir() / "mesh.json"


def write(state: MeshState) -> None:
    """Replace the state file in one move: a reader sees the old one or the new one."""
    path = state_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    part.replace(path)


def last() -> MeshState | None:
    """The state as last written, whether that mesh still runs or not."""
    try:
        return msgspec.json.decode(state_file().read_bytes(), type=MeshState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def running() -> MeshState | None:
    """The running mesh; None if there is none."""
    state = last()
    return state if state is not None and state.supervisor() is not None else None
