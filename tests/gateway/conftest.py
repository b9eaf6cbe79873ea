"""A gateway between peers that play scheduler and worker by script, over real gRPC on loopback.

The gateway is the real one: real servers, real tokenizer, real channels. scripted_peers.py are its peers, scripts.py is
what they say, sse.py what a client has heard.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from gateway.prompt.text_model import TextModel
from gateway.service import Gateway, running
from gateway.settings import GatewaySettings
from mesh import models
from mesh.telemetry import Telemetry

from .scripted_peers import MODEL, ScriptedScheduler, ScriptedWorker
from .scripts import Script, accepted, finished, first, hangs, progresses, raises, resets, says, tokens
from .sse import Stream


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return TextModel.load(models.find(MODEL))


@pytest.fixture(scope="session")
def ids_of(text_model: TextModel) -> Callable[[str], list[int]]:
    """The token ids of a text, as a worker would emit them."""
    return lambda text: list(text_model.vocabulary.full.encode(text, add_special_tokens=False).ids)


@dataclass
class ScriptedMesh:
    """What a test holds: the peers, the gateway, and an HTTP client for it."""

    scheduler: ScriptedScheduler
    workers: list[ScriptedWorker]
    stack: AsyncExitStack
    text_model: TextModel
    gateways: list[Gateway] = field(default_factory=list)

    @property
    def worker(self) -> ScriptedWorker:
        return self.workers[0]

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    async def add_worker(self, *scripts: Script) -> ScriptedWorker:
        worker = ScriptedWorker(f"w{len(self.workers) + 1}")
        worker.scripts = list(scripts) or worker.scripts
        await worker.start()
        self.stack.push_async_callback(worker.kill)
        self.workers.append(worker)
        self.scheduler.workers.append(worker)
        self.scheduler.changed()
        return worker

    async def start_gateway(self, **given: Any) -> Gateway:
        """A gateway that has heard of every worker by the time this returns."""
        gateway = await self.stack.enter_async_context(serving(self.scheduler.address, self.text_model, **given))
        self.gateways.append(gateway)
        return gateway

    def http(self, gateway: Gateway | None = None) -> httpx.AsyncClient:
        base = f"http://127.0.0.1:{(gateway or self.gateway).http_port}"
        return httpx.AsyncClient(base_url=base, timeout=20, trust_env=False)


@asynccontextmanager
async def serving(schedulers: str, text_model: TextModel, **given: Any) -> AsyncIterator[Gateway]:
    """A real gateway on free ports."""
    ports = {"http_port": 0, "grpc_port": 0, "log_level": "error", "log_format": "text", "drain_s": 5}
    settings = GatewaySettings.load(**{**ports, "schedulers": schedulers, "model": MODEL, **given})
    telemetry = Telemetry(settings, instance="test")
    async with running(settings, telemetry, {MODEL: text_model}) as gateway:
        yield gateway


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Telemetry takes over the root logger; give it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def mesh(
    text_model: TextModel, logging_as_before: None, eventually: Callable[..., Any]
) -> AsyncIterator[ScriptedMesh]:
    """One scheduler, one worker and one gateway that is ready."""
    async with AsyncExitStack() as stack:
        scheduler = ScriptedScheduler(text_model.tokenizer_digest)
        await scheduler.start()
        stack.push_async_callback(scheduler.kill)
        scripted = ScriptedMesh(scheduler, [], stack, text_model)
        await scripted.add_worker()
        await scripted.start_gateway()
        await eventually(lambda: not scripted.gateway.missing)
        yield scripted


class Play:
    """The scripts, by name, for tests."""

    says = staticmethod(says)
    first = staticmethod(first)
    raises = staticmethod(raises)
    hangs = staticmethod(hangs)
    progresses = staticmethod(progresses)
    resets = staticmethod(resets)
    tokens = staticmethod(tokens)
    finished = staticmethod(finished)
    accepted = staticmethod(accepted)
    serving = staticmethod(serving)
    Scheduler = ScriptedScheduler


@pytest.fixture(scope="session")
def play() -> type[Play]:
    return Play


@pytest.fixture
def ask(mesh: ScriptedMesh) -> Callable[..., Any]:
    """`await ask(stream=True, **body)`: a Stream, its lines told to `heard` as they come; or the response, read."""

    async def asked(
        path: str = "/v1/chat/completions",
        *,
        gateway: Gateway | None = None,
        heard: Callable[[str], object] = lambda _: None,
        **body: Any,
    ) -> Any:
        default = {"prompt": "Say"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Say"}]}
        async with mesh.http(gateway) as client:
            request = client.build_request("POST", path, json={"model": MODEL, **default, **body})
            response = await client.send(request, stream=True)
            if body.get("stream") and response.status_code == 200:
                stream = Stream(200, response.headers, [])
                async for line in response.aiter_lines():
                    stream.lines.append(line)
                    heard(line)
                return stream
            await response.aread()
            return response

    return asked
