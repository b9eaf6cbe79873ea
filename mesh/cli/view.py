"""How the running mesh looks in a terminal: one table of processes and load, and what to try first."""

import shutil
import sys
from pathlib import Path

import grpc
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh.cli.state import MeshState, ProcessState
from mesh.client import connect
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

QUESTION = "What is the capital of France?"
_COLOURS = {"ready": "green", "starting": "yellow", "restarting": "yellow", "stopping": "yellow", "stopped": "dim"}


async def mesh_load(state: MeshState, timeout_s: float = 1.0) -> scheduler_pb2.MeshLoad | None:
    """The mesh as its first answering scheduler sees it; None if none answers."""
    for address in state.scheduler_addresses:
        async with connect(address) as channel:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchLoad(
                scheduler_pb2.WatchLoadRequest(), timeout=timeout_s
            )
            try:
                async for load in call:
                    return load
            except grpc.aio.AioRpcError:
                continue
            finally:
                call.cancel()
    return None


def table(state: MeshState, load: scheduler_pb2.MeshLoad | None) -> RenderableType:
    """Processes with their load. Workers are matched by port."""
    rows = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("process", "state", "pid", "ports", "restarts", "load"):
        rows.add_column(column, justify="right" if column in ("pid", "restarts") else "left")
    for process in state.processes:
        ports = ", ".join(f"{name} {port}" for name, port in process.ports.items())
        phase = Text(process.state, style=_COLOURS.get(process.state, "red"))
        load_text = load_of(process, load) if load is not None else ""
        rows.add_row(process.name, phase, str(process.pid or "-"), ports, str(process.restarts), load_text)
    return Group(Text(f"Shoal is {state.phase}, serving {state.model}", style="bold"), rows)


def load_of(process: ProcessState, load: scheduler_pb2.MeshLoad) -> str:
    """A few words on what a worker or a scheduler is busy with."""
    if process.role == "scheduler":
        waiting = sum(queue.waiting for queue in load.queues)
        return f"{waiting} queued"
    for worker in load.workers:
        if process.role == "worker" and worker.hello.address.rpartition(":")[2] == str(process.ports["grpc"]):
            now = worker.load
            blocks = max(1, worker.hello.total_blocks)
            engine = "simulated, " if worker.hello.simulated else ""
            return (
                f"{engine}{now.running_sequences} running, {now.waiting_sequences} waiting, "
                f"KV {100 * now.used_blocks // blocks} % used {100 * now.cached_blocks // blocks} % cached, "
                f"{now.decode_tokens_per_s:.0f} tok/s"
            )
    return ""


def things_to_try(state: MeshState) -> str:
    """Three ways to ask a first question, ready to paste."""
    shoal = shutil.which("shoal") or str(Path(sys.executable).with_name("shoal"))
    body = f'{{"model": "{state.model}", "temperature": 0, "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'
    return f"""\
HTTP   {state.http_url}/v1      (OpenAI API; /ready, /metrics)
gRPC   {state.grpc_address}            (shoal.gateway.v1.InferenceService)

Three things to try:

  curl {state.http_url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'

  {shoal} chat "{QUESTION}"

  {sys.executable} -c 'import openai; c = openai.OpenAI(base_url="{state.http_url}/v1", api_key="none"); \\
    print(c.chat.completions.create(model="{state.model}", temperature=0, \\
    messages=[{{"role": "user", "content": "{QUESTION}"}}]).choices[0].message.content)'
"""
