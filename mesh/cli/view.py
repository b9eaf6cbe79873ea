"""How the running mesh looks in a terminal: its processes, their load, how it is scaled, and what to try first."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh.cli import probes
from mesh.cli.state import MeshState
from mesh.tls import TlsError
from shoal.scheduler.v1 import scheduler_pb2

QUESTION = "What is the capital of Japan?"
_UNDER_WAY = ("starting", "restarting", "leaving", "draining", "stopping")
_COLOURS = {"ready": "green", "stopped": "dim"} | dict.fromkeys(_UNDER_WAY, "yellow")


async def mesh_load(state: MeshState, timeout_s: float = 1.0) -> scheduler_pb2.MeshLoad | None:
    """The mesh as its first answering scheduler sees it; None if none answers, or none would trust us."""
    try:
        tls = probes.operator(state.tls_dir)
    except TlsError:
        return None
    for address in state.scheduler_addresses:
        if (load := await probes.mesh_load(address, tls, timeout_s)) is not None:
            return load
    return None


def table(state: MeshState, load: scheduler_pb2.MeshLoad | None) -> RenderableType:
    """The processes and, below, what the workers are busy with. Fits 80 columns."""
    head = f"Shoal is {state.phase}, serving {state.model}"
    rows: list[RenderableType] = [_processes(state)]
    if state.phase == "degraded":
        rows += [Text(words, style="yellow") for words in troubles(state, time.time())]
    if load is None:
        return Group(Text(head, style="bold"), *rows)
    waiting = sum(queue.waiting for queue in load.queues)
    head += f", {waiting} waiting for a worker" if waiting else ""
    return Group(Text(head, style="bold"), *rows, Text(), _workers(state, load))


def troubles(state: MeshState, now: float) -> list[str]:
    """A line for each process that is not ready: for how long (`now` is a Unix time), and why."""
    return [
        f"{process.name} {process.state} for {max(0.0, now - process.since):.0f} s"
        + (f", {process.why}" if process.why else "")
        for process in state.processes
        if process.state != "ready"
    ]


def _processes(state: MeshState) -> Table:
    restarted = any(process.restarts for process in state.processes)
    rows = _columns("process", "state", "pid", "ports", *(["restarts"] if restarted else []), right=("pid", "restarts"))
    for process in state.processes:
        ports = ", ".join(f"{name} {port}" for name, port in process.ports.items())
        phase = Text(process.state, style=_COLOURS.get(process.state, "red"))
        restarts = [str(process.restarts)] if restarted else []
        rows.add_row(process.name, phase, str(process.pid or "-"), ports, *restarts)
    return rows


def _workers(state: MeshState, load: scheduler_pb2.MeshLoad) -> Table:
    """Workers are matched to their processes by port; others of the mesh are named by their id."""
    names = {str(process.ports["grpc"]): process.name for process in state.processes if process.role == "worker"}
    numbers = ("running", "waiting", "KV used", "KV cached", "tok/s")
    rows = _columns("worker", *numbers, right=numbers)
    for worker in load.workers:
        now, blocks = worker.load, max(1, worker.hello.total_blocks)
        rows.add_row(
            names.get(worker.hello.address.rpartition(":")[2], worker.hello.worker_id)
            + (" (simulated)" if worker.hello.simulated else ""),
            str(now.running_sequences),
            str(now.waiting_sequences),
            f"{100 * now.used_blocks // blocks} %",
            f"{100 * now.cached_blocks // blocks} %",
            f"{now.decode_tokens_per_s:.0f}" if now.running_sequences else "-",
        )
    return rows


def steps(of: Mapping[str, str]) -> RenderableType:
    """How far each process is that comes or goes; before there is any, what is said of the whole (the empty name)."""
    if of.keys() == {""}:
        return Text(of[""])
    rows = _columns("process", "state", right=())
    for process, step in of.items():
        if process:
            rows.add_row(process, Text(step, style=_COLOURS.get(step, "")))
    return rows


def scaled(counts: Mapping[str, int], killed: Sequence[str]) -> str:
    """What there is after scaling."""
    have = ", ".join(f"{count} {role}{'' if count == 1 else 's'}" for role, count in counts.items())
    late = f" Killed, because not drained in time: {', '.join(killed)}." if killed else ""
    return f"The mesh has {have}.{late}"


def _columns(*names: str, right: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def doors(state: MeshState) -> str:
    """Where clients find the gateways, the first of each with what it is."""
    http = [f"HTTP   {url}/v1" for url in state.http_urls]
    grpc = [f"gRPC   {address}" for address in state.grpc_addresses]
    for lines, what in ((http, "OpenAI API; /ready, /metrics"), (grpc, "shoal.gateway.v1.InferenceService")):
        lines[:1] = [f"{line:<36} ({what})" for line in lines[:1]]
    return "\n".join(http + grpc)


def needs_keys(environ: Mapping[str, str]) -> bool:
    """Whether gateways that are started with `environ` want API keys, by the variables that they read."""
    anonymous = environ.get("SHOAL_GATEWAY_ALLOW_ANONYMOUS", "").lower() in ("1", "true", "yes", "on", "t", "y")
    return bool(environ.get("SHOAL_GATEWAY_TENANTS_FILE")) and not anonymous


def things_to_try(state: MeshState) -> str:
    """Three ways to ask a first question, ready to paste."""
    shoal = shutil.which("shoal") or str(Path(sys.executable).with_name("shoal"))
    messages = [{"role": "user", "content": QUESTION}]
    body = json.dumps({"model": state.model, "temperature": 0, "messages": messages})
    code = f"""\
import openai; c = openai.OpenAI(base_url="{state.http_url}/v1", api_key="none"); \\
    print(c.chat.completions.create(model={json.dumps(state.model)}, temperature=0, \\
    messages={json.dumps(messages)}).choices[0].message.content)"""
    keys = needs_keys(os.environ)
    if keys:
        code = code.replace("import openai", "import os, openai").replace('"none"', 'os.environ["SHOAL_API_KEY"]')
    bearer = '-H "Authorization: Bearer $SHOAL_API_KEY" ' if keys else ""
    first = ", after `export SHOAL_API_KEY=...` with a key of yours (API keys are on)" if keys else ""
    ca = shlex.quote(str(Path(state.tls_dir) / "ca.pem")) if state.tls_dir else ""
    trust, environment = (f"--cacert {ca} ", f"SSL_CERT_FILE={ca} ") if ca else ("", "")
    notices = "".join(f"Note: {notice}\n" for notice in state.notices)
    return f"""\
{notices}{doors(state)}

Three things to try{first}:

  curl {trust}{bearer}{state.http_url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d {shlex.quote(body)}

  {shlex.quote(shoal)} chat {shlex.quote(QUESTION)}

  {environment}{shlex.quote(sys.executable)} -c {shlex.quote(code)}
"""
