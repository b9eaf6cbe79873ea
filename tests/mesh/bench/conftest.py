"""A server that streams as OpenAI's API does, and misbehaves as the model's name says."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mesh.bench.load import LoadPlan
from mesh.cli.pull import pull
from mesh.models import ModelFolder


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "SseServer"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": [{"id": name} for name in self.server.listed]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.connections.add(self.client_address)
        getattr(self, f"_{body['model']}")(body["max_tokens"])

    def _good(self, tokens: int) -> None:
        self._start()
        self._send('{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}')
        for _ in range(tokens):
            self._text()
        self._end(tokens)

    def _slow(self, tokens: int) -> None:
        time.sleep(0.2)
        self._good(tokens)

    def _busy(self, tokens: int) -> None:
        self._whole(503, {"error": {"message": "no worker", "code": "no_worker"}})

    def _breaks(self, tokens: int) -> None:
        self._start()
        self._text()
        self.wfile.flush()
        self.close_connection = True

    def _short(self, tokens: int) -> None:
        self._start()
        self._text()
        self._end(1, reason="stop")

    def _inband(self, tokens: int) -> None:
        self._start()
        self._text()
        self._send('{"error":{"message":"the worker broke","code":"worker_lost"}}')
        self._done()

    def _nodone(self, tokens: int) -> None:
        self._start()
        self._text()
        self._send('{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}')
        self._chunk(b"")

    def _garbled(self, tokens: int) -> None:
        self._start()
        self._send("{not json")
        self._done()

    def _empty(self, tokens: int) -> None:
        self._start()
        self._end(0)

    def _hangs(self, tokens: int) -> None:
        self._start()
        self._text()
        self.server.over.wait(10)
        self.close_connection = True

    def _whole(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _start(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _text(self) -> None:
        self._send(
            '{"choices":[{"index":0,"delta":{"content":" \\"finish_reason\\":\\"stop\\""},"finish_reason":null}]}'
        )

    def _end(self, tokens: int, reason: str = "length") -> None:
        self._send(f'{{"choices":[{{"index":0,"delta":{{}},"finish_reason":"{reason}"}}]}}')
        self._send(f'{{"choices":[],"usage":{{"prompt_tokens":7,"completion_tokens":{tokens}}}}}')
        self._done()

    def _done(self) -> None:
        self._send("[DONE]")
        self._chunk(b"")

    def _send(self, data: str) -> None:
        self._chunk(f"data: {data}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class SseServer(ThreadingHTTPServer):
    """`bodies` are the requests' JSON, `connections` the client addresses that sent any."""

    daemon_threads = True
    disable_nagle_algorithm = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.connections: set[object] = set()
        self.listed = ["good"]
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[SseServer]:
    with SseServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def plan(server: SseServer) -> Callable[..., LoadPlan]:
    """`plan(model=..., ...)` is a short closed loop against the server."""

    def make(**changes: object) -> LoadPlan:
        short = {"model": "good", "requests": 6, "streams": 2, "input_tokens": 4, "output_tokens": 5, "warmup": 0}
        return LoadPlan(**({"urls": [server.url]} | short | changes))

    return make


@pytest.fixture(scope="session")
def smollm2() -> ModelFolder:
    """The default model, in this user's own cache: downloaded by the first test run only."""
    return pull("smollm2-135m")
