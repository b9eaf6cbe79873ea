"""`shoal chat` against a real gRPC server that plays the gateway."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status
from rich.console import Console
from typer.testing import CliRunner

import shoal
from mesh.cli.authority import Authority, Validity
from mesh.cli.certs import make_set
from mesh.cli.chat import Chat
from mesh.cli.main import app
from mesh.cli.problem import Problem
from mesh.errors import InvalidRequest, Overloaded, ShoalError, Unavailable, WorkerLost, status_of
from mesh.tls import GATEWAY, Tls
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.gateway.v1 import gateway_pb2_grpc as rpc
from shoal.types.v1 import types_pb2


class EchoGateway(rpc.InferenceServiceServicer):
    """Answers "echo: " and the last turn's text. `hang on` starts an answer that never ends."""

    def __init__(self) -> None:
        self.requests: list[pb.ChatRequest] = []
        self.refuse: ShoalError | None = None
        self.hang_ended = threading.Event()
        self.finish = types_pb2.FINISH_REASON_STOP

    def Chat(self, request: pb.ChatRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        if self.refuse is not None:
            refuse, self.refuse = self.refuse, None
            context.abort_with_status(rpc_status.to_status(status_of(refuse)))
        said = request.messages[-1].content
        yield pb.GenerateResponse(started=pb.Started(model=request.model))
        yield pb.GenerateResponse(delta=pb.Delta(text="echo: "))
        if said == "hang on":
            context.add_callback(self.hang_ended.set)
            self.hang_ended.wait(30)
            return
        yield pb.GenerateResponse(delta=pb.Delta(text=said))
        yield pb.GenerateResponse(finished=pb.ChoiceFinished(reason=self.finish))
        yield pb.GenerateResponse(completed=pb.Completed(usage=types_pb2.Usage(completion_tokens=7)))

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="tiny", workers=1)])

    def turns(self) -> list[list[tuple[str, str]]]:
        return [[(m.role, m.content) for m in request.messages] for request in self.requests]


@pytest.fixture
def gateway() -> EchoGateway:
    return EchoGateway()


@pytest.fixture
def address(gateway: EchoGateway) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_InferenceServiceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def chat(*arguments: str, typed: str = ""):
    return CliRunner().invoke(app, ["chat", *arguments], input=typed, catch_exceptions=True)


def test_a_question_gets_its_answer_as_plain_text_away_from_a_terminal(gateway, address):
    result = chat("**hello**", "--grpc", address)
    assert (result.exit_code, result.stdout) == (0, "echo: **hello**\n")
    assert gateway.requests[0].model == "tiny"


def test_options_travel_with_the_question(gateway, address):
    options = ["--temperature", "0", "--max-tokens", "9", "--seed", "7", "--system", "be brief", "--model", "other"]
    assert chat("hi", "--grpc", f"http://{address}/", *options).exit_code == 0
    request = gateway.requests[0]
    sampling = request.options.sampling
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, request.model) == (0, 9, 7, "other")
    assert gateway.turns() == [[("system", "be brief"), ("user", "hi")]]


def test_without_options_an_answer_is_reproducible_and_bounded(gateway, address):
    chat("hi", "--grpc", address)
    assert gateway.requests[0].options.sampling == types_pb2.SamplingParams(temperature=0, max_tokens=1024)


def test_an_address_without_its_port_is_told_as_such():
    for given in ("localhost", "http://localhost/"):
        assert chat("hi", "--grpc", given).exception.message == f"--grpc {given}: the port is missing"


def test_a_model_that_is_not_there_names_the_option(gateway, address):
    gateway.refuse = InvalidRequest("the model 'nope' does not exist here", field="model")
    assert chat("hi", "--grpc", address, "--model", "nope").exception.advice == "(change --model)"


def test_an_answer_that_max_tokens_cut_says_so_on_a_terminal(gateway, address, capsys):
    gateway.finish = types_pb2.FINISH_REASON_LENGTH
    with shoal.SyncClient(address, model="tiny") as client:
        for terminal in (True, False):
            Chat(client, Console(force_terminal=terminal), None, {}).ask("hi")
            assert ("(cut at 7 tokens" in capsys.readouterr().out) is terminal


def test_the_end_of_piped_input_is_exit_code_0(gateway, address, home):
    command = [sys.executable, "-m", "mesh.cli.main", "chat", "--grpc", address]
    ran = subprocess.run(command, input="question", capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "echo: question\n", "")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    make_set(tmp_path / "certs")
    return tmp_path / "certs"


@pytest.fixture
def secure_address(gateway: EchoGateway, certificates: Path) -> Iterator[str]:
    """The gateway over TLS, which asks for certificates."""
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_InferenceServiceServicer_to_server(gateway, server)
    credentials = Tls(certificates, GATEWAY).server_credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_with_a_folder_of_certificates_it_is_the_operator(secure_address, certificates, monkeypatch):
    monkeypatch.setenv("SHOAL_TLS_DIR", str(certificates))
    result = chat("hello", "--grpc", secure_address)
    assert (result.exit_code, result.stdout) == (0, "echo: hello\n")


def test_why_a_gateway_and_chat_do_not_trust_each_other_is_told(secure_address, address, certificates, tmp_path):
    plain = chat("hi", "--grpc", secure_address).exception
    assert plain.message == f"{secure_address} speaks TLS"
    assert "--ca FILE" in plain.advice
    (tmp_path / "other.pem").write_bytes(Authority(Validity.days(1)).pem)
    other = chat("hi", "--grpc", secure_address, "--ca", str(tmp_path / "other.pem")).exception
    assert "do not trust each other" in other.message
    assert "other.pem" in other.advice
    needless = chat("hi", "--grpc", address, "--ca", str(certificates / "ca.pem")).exception
    assert needless.message == f"{address} speaks no TLS"
    missing = chat("hi", "--grpc", address, "--ca", str(tmp_path / "nothing.pem")).exception
    assert missing.message == f"{tmp_path}/nothing.pem: No such file or directory"


def test_an_http_port_is_told_from_a_gateway_that_is_not_there():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        error = chat("hi", "--grpc", f"http://127.0.0.1:{server.server_port}").exception
        server.shutdown()
    assert isinstance(error, Problem)
    assert "is an HTTP port" in error.message
    assert "--grpc HOST:PORT" in error.advice


def test_a_conversation_remembers_its_turns_until_reset(gateway, address):
    result = chat("--grpc", address, "--system", "S", typed="one\n\ntwo\n/reset\nthree\n/exit\nnever\n")
    assert result.exit_code == 0
    start = ("system", "S")
    assert gateway.turns() == [
        [start, ("user", "one")],
        [start, ("user", "one"), ("assistant", "echo: one"), ("user", "two")],
        [start, ("user", "three")],
    ]


def test_a_refused_question_ends_neither_the_conversation_nor_enters_it(gateway, address):
    gateway.refuse = Overloaded("the queue is full", retry_after_s=3)
    result = chat("--grpc", address, typed="one\ntwo\n")
    assert "the queue is full (try again in 3 s)" in result.stdout
    assert gateway.turns() == [[("user", "one")], [("user", "two")]]


def test_a_refused_single_question_is_a_problem_that_names_the_field(gateway, address):
    gateway.refuse = InvalidRequest("too many tokens", field="messages")
    error = chat("one", "--grpc", address).exception
    assert isinstance(error, Problem)
    assert (error.message, error.advice) == ("too many tokens", "(change messages)")


@pytest.mark.parametrize("error", [WorkerLost("the worker broke and no other could go on"), Unavailable("no worker")])
def test_an_error_of_a_mesh_that_answers_is_told_as_its_own(gateway, address, error):
    gateway.refuse = error
    problem = chat("one", "--grpc", address).exception
    assert isinstance(problem, Problem)
    assert (problem.message, problem.advice) == (error.message, "")


def test_without_a_mesh_chat_says_how_to_start_one(home):
    error = chat("hi").exception
    assert isinstance(error, Problem)
    assert error.message == "no mesh is running"
    assert "shoal up" in error.advice


def test_a_gateway_that_does_not_answer_is_named():
    error = chat("hi", "--grpc", "127.0.0.1:1").exception
    assert isinstance(error, Problem)
    assert "no gateway answers at 127.0.0.1:1" in error.message


def test_ctrl_c_stops_the_answer_and_not_the_program(gateway, address, home):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "mesh.cli.main", "chat", "--grpc", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SHOAL_HOME": str(home)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hang on\n")
    process.stdin.flush()
    assert process.stdout.read(len("echo: ")) == "echo: "
    process.send_signal(signal.SIGINT)
    assert gateway.hang_ended.wait(10)
    rest, _ = process.communicate("still there\n", timeout=20)
    assert process.returncode == 0
    assert rest.splitlines() == ["", "(stopped)", "echo: still there"]
    assert gateway.turns()[-1] == [("user", "still there")]
