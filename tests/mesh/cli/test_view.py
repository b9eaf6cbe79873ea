"""What `shoal up` and `shoal status` print: it fits a terminal, and what is to be pasted works."""

import json
import os
import shlex

import msgspec
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from mesh.cli import state
from mesh.cli.main import app
from mesh.cli.plan import MeshPlan, ProcessSpec
from mesh.cli.state import MeshState, ProcessState
from mesh.cli.supervisor import Supervisor, moved_ports
from mesh.cli.view import table, things_to_try, troubles
from shoal.scheduler.v1 import scheduler_pb2


def process(role: str, restarts: int = 0, **ports: int) -> ProcessState:
    return ProcessState(
        role=role, index=0, pid=4_194_303, state="restarting", restarts=restarts, ports=ports, log="/x.log"
    )


def mesh(model: str = "smollm2-135m", restarts: int = 0) -> MeshState:
    return MeshState(
        supervisor_pid=1,
        supervisor_created=0.0,
        phase="ready",
        model=model,
        http_urls=["http://127.0.0.1:8000"],
        grpc_addresses=["127.0.0.1:50051"],
        scheduler_addresses=["127.0.0.1:50061"],
        processes=[
            process("scheduler", restarts, grpc=50061, metrics=9161),
            process("worker", restarts, grpc=50071, metrics=9171),
            process("gateway", http=8000, grpc=50051),
        ],
    )


LOAD = scheduler_pb2.MeshLoad(
    workers=[
        scheduler_pb2.WorkerState(
            hello=scheduler_pb2.Hello(worker_id="w", address="127.0.0.1:50071", total_blocks=200, simulated=True),
            load=scheduler_pb2.Load(
                running_sequences=64, waiting_sequences=128, used_blocks=199, cached_blocks=1, decode_tokens_per_s=12345
            ),
        )
    ],
    queues=[scheduler_pb2.QueueState(model="smollm2-135m", waiting=999)],
)


@pytest.mark.parametrize("restarts", [0, 12])
def test_status_fits_eighty_columns_with_every_figure_in_it(restarts: int) -> None:
    def printed(width: int) -> str:
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table(mesh(restarts=restarts), LOAD))
        return capture.get()

    lines = [line.rstrip() for line in printed(80).splitlines()]
    assert lines == [line.rstrip() for line in printed(300).splitlines()], "something was wrapped or cut"
    assert ("restarts" in lines[1]) == bool(restarts)
    assert lines[-1].split() == ["worker-0", "(simulated)", "64", "128", "99", "%", "0", "%", "12345"]
    assert "999 waiting" in lines[0]


@pytest.mark.parametrize("model", ["smollm2-135m", 'it\'s a "model"'])
def test_what_is_to_be_pasted_asks_for_the_served_name_whatever_is_in_it(model: str) -> None:
    words = shlex.split(things_to_try(mesh(model)).split("try:")[1])
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["messages"][0]["role"]) == (model, "user")
    code = words[words.index("-c") + 1]
    compile(code, "pasted", "exec")
    assert json.dumps(model) in code


def test_a_model_given_as_a_path_is_told_by_the_name_that_the_gateway_serves(home, tmp_path) -> None:
    supervisor = Supervisor(MeshPlan(model=str(tmp_path / "folder")))
    assert supervisor.snapshot().model == "folder"
    assert supervisor.snapshot().stop_s > 25


def degraded() -> MeshState:
    gone = ProcessState(
        role="gateway", index=0, pid=None, state="restarting", restarts=1, ports={}, log="/x.log", since=100.0,
        why="ended by SIGKILL",
    )  # fmt: skip
    ready = msgspec.structs.replace(gone, role="worker", state="ready", why="")
    return msgspec.structs.replace(mesh(), phase="degraded", scheduler_addresses=[], processes=[ready, gone])


def test_a_degraded_mesh_names_what_is_not_ready_for_how_long_and_why() -> None:
    assert troubles(degraded(), now=107.2) == ["gateway-0 restarting for 7 s, ended by SIGKILL"]


def test_status_of_a_degraded_mesh_says_so_and_where_the_logs_are_with_exit_code_1(home) -> None:
    me = psutil.Process()
    mine = {"supervisor_pid": os.getpid(), "supervisor_created": me.create_time()}
    state.write(msgspec.structs.replace(degraded(), **mine))
    result = CliRunner().invoke(app, ["status"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[0].startswith("Shoal is degraded")
    assert any("ended by SIGKILL" in line for line in lines)
    assert lines[-1] == f"Logs: {home / 'run' / 'logs'}"


def test_a_note_is_shown_before_what_to_try() -> None:
    told = things_to_try(msgspec.structs.replace(mesh(), notices=["SHOAL_X is set but nothing reads it"]))
    assert told.startswith("Note: SHOAL_X is set but nothing reads it\n")


def test_with_tls_what_to_try_trusts_the_meshs_ca() -> None:
    told = things_to_try(
        msgspec.structs.replace(mesh(), http_urls=["https://127.0.0.1:8000"], tls_dir="/home/of a/certs")
    )
    assert "curl --cacert '/home/of a/certs/ca.pem' https://127.0.0.1:8000/v1/chat/completions" in told
    assert "SSL_CERT_FILE='/home/of a/certs/ca.pem' " in told
    assert "cacert" not in things_to_try(mesh())


def test_where_api_keys_are_on_what_to_try_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_GATEWAY_TENANTS_FILE", "tenants.toml")
    told = things_to_try(mesh())
    assert "export SHOAL_API_KEY=" in told
    words = shlex.split(told.split("try,")[1].split("are on):")[1])
    assert "Authorization: Bearer $SHOAL_API_KEY" in words
    code = words[words.index("-c") + 1]
    compile(code, "pasted", "exec")
    assert 'api_key=os.environ["SHOAL_API_KEY"]' in code
    monkeypatch.delenv("SHOAL_GATEWAY_TENANTS_FILE")
    assert "API_KEY" not in things_to_try(mesh())


def test_status_tells_where_clients_connect_and_no_speed_of_an_idle_worker(home) -> None:
    me = psutil.Process()
    mine = {"supervisor_pid": os.getpid(), "supervisor_created": me.create_time()}
    secure = {"http_urls": ["https://127.0.0.1:8000", "https://127.0.0.1:8001"], "scheduler_addresses": []}
    state.write(msgspec.structs.replace(mesh(), **mine, **secure))
    lines = CliRunner().invoke(app, ["status"]).stdout.splitlines()
    assert "HTTP   https://127.0.0.1:8001/v1" in lines
    assert any(line.startswith("gRPC   127.0.0.1:50051 ") for line in lines)
    idle = scheduler_pb2.MeshLoad()
    idle.CopyFrom(LOAD)
    idle.workers[0].load.running_sequences = 0
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(mesh(), idle))
    assert capture.get().split()[-1] == "-"


def test_a_port_that_was_named_and_is_taken_is_told_with_the_one_instead() -> None:
    gateway = ProcessSpec(role="gateway", index=0, argv=[], ports={"http": 8124, "grpc": 50052})
    assert moved_ports(MeshPlan(model="m", first_http_port=8123), [gateway]) == [
        "HTTP port 8123 was taken, so gateway-0 listens on 8124"
    ]
