"""What a benchmark ran on: the machine, the checkout's commit and the versions that matter. Looks, changes nothing."""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VERSIONS = ("shoal", "torch", "grpcio", "uvicorn", "uvloop", "tokenizers")
GIT_TIMEOUT_S = 5.0
VECTORS = ("amx_int8", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "asimd")


def describe() -> dict[str, Any]:
    """Processor, cores, memory and system."""
    import psutil

    return {
        "cpu": cpu_name(_read("/proc/cpuinfo")) or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "vectors": vectors(_read("/proc/cpuinfo")),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": system_name(_read("/etc/os-release")) or platform.system(),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def words(machine: dict[str, Any]) -> str:
    """The same in one line."""
    return (
        f"{machine['cores']} cores of {machine['cpu']} ({machine['vectors']}), {machine['memory_gib']:g} GiB, "
        f"{machine['system']}, load {machine['load_before']:g} before"
    )


def cpu_name(cpuinfo: str) -> str:
    """The first core's model name; empty if it has none, as on ARM."""
    line = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, flags=re.MULTILINE)
    return line[1].strip() if line else ""


def vectors(cpuinfo: str) -> str:
    """The vector instructions that decide how fast an engine can be."""
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, flags=re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    return ", ".join(name for name in VECTORS if name in flags) or "none known"


def system_name(os_release: str) -> str:
    line = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', os_release, flags=re.MULTILINE)
    return line[1] if line else ""


def software(names: Iterable[str] = VERSIONS) -> dict[str, Any]:
    """Commit, Python and the versions of `names` that are installed."""
    found: dict[str, Any] = {"commit": commit(), "python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, with a "+" if files differ from it; None for an installation without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
