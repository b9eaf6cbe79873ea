"""A gateway that answers by script, on a real gRPC server: what the thin client is tested against."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from mesh.errors import ShoalError, status_of
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.gateway.v1 import gateway_pb2_grpc as rpc


class ScriptedGateway(rpc.InferenceServiceServicer):
    """Answers each call with `script`; a ShoalError in it ends the call, `hang` keeps it open until it is cancelled."""

    def __init__(self) -> None:
        self.address = ""
        self.script: list[pb.GenerateResponse | ShoalError] = []
        self.hang = False
        self.models = [pb.Model(name="tiny", context_tokens=64, workers=2)]
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.ended = threading.Event()

    def _answer(self, request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self.ended.set)
        for event in self.script:
            if isinstance(event, ShoalError):
                context.abort_with_status(rpc_status.to_status(status_of(event)))
            else:
                yield event
        if self.hang:
            self.ended.wait(30)

    Chat = Generate = _answer

    def CountTokens(self, request: pb.CountTokensRequest, context: grpc.ServicerContext) -> pb.CountTokensResponse:
        self.requests.append(request)
        return pb.CountTokensResponse(prompt_tokens=7, context_tokens=64)

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        self.requests.append(request)
        return pb.ListModelsResponse(models=self.models)


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    service = ScriptedGateway()
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_InferenceServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield service
    server.stop(0).wait()
