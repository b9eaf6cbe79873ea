"""The synchronous twin of shoal.client: the same methods over gRPC's synchronous channel.

Use it where no event loop runs:

    with shoal.SyncClient("localhost:50051") as client:
        for piece in client.chat("What is the capital of Japan?", temperature=0):
            print(piece.text, end="")
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import grpc

from shoal.answer import Answer, Model, Piece, TokenCount
from shoal.channel import ClientTls, channel_options, trust
from shoal.client import ANSWER_TIMEOUT_S, LOOKUP_TIMEOUT_S, bearer
from shoal.failure import status_as_failure
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.gateway.v1 import gateway_pb2_grpc as rpc
from shoal.reading import Reading, models_of, only_model, token_count_of
from shoal.request import ChatOptions, Conversation, Options, Prompt, chat_request, generate_request

Method: TypeAlias = "grpc.UnaryStreamMultiCallable[Any, pb.GenerateResponse]"


class SyncStream(Reading):
    """An answer as it comes. Iterate it once: the call starts then, and is cancelled when you stop early.

    `started` is known from the first piece on, `summary` after the last. Iterating raises ShoalClientError.
    """

    def __init__(
        self, client: "SyncClient", method: Method, request: pb.ChatRequest | pb.GenerateRequest, timeout_s: float
    ) -> None:
        super().__init__()
        self._client = client
        self._method = method
        self._request = request
        self._timeout_s = timeout_s

    def __iter__(self) -> Iterator[Piece]:
        self._request.model = self._request.model or self._client.default_model()
        call = self._method(self._request, timeout=self._timeout_s, metadata=self._client.metadata)
        try:
            with status_as_failure():
                for response in call:
                    piece = self.read(response)
                    if piece is not None:
                        yield piece
        finally:
            call.cancel()  # does nothing to a call that ended; without it the mesh would go on for nobody

    def whole(self) -> Answer:
        """All of it at once."""
        return self.answer([piece for piece in self])


class SyncClient:
    """A connection to a mesh's gateway, "host:port". Close it, or use it as `with`.

    `model` is used where a call names none; without it, the one model that the mesh serves. With `tls`, the path of
    the CA's PEM file or a ClientTls, it speaks TLS and trusts no other gateway.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        model: str | None = None,
        api_key: str | None = None,
        tls: ClientTls | Path | str | None = None,
    ) -> None:
        if (secure := trust(tls)) is None:
            self._channel = grpc.insecure_channel(address, options=channel_options())
        else:
            options = (*channel_options(), *secure.options())
            self._channel = grpc.secure_channel(address, secure.credentials(), options=options)
        self._rpc = rpc.InferenceServiceStub(self._channel)
        self._model = model
        self.metadata = bearer(api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and close the connection."""
        self._channel.close()

    def chat(self, conversation: Conversation, **options: Unpack[ChatOptions]) -> SyncStream:
        """The answer to a question or a list of turns, piece by piece."""
        request = chat_request(conversation, options)
        return SyncStream(self, self._rpc.Chat, request, options.get("timeout_s", ANSWER_TIMEOUT_S))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> SyncStream:
        """The continuation of a text or of token ids, piece by piece."""
        request = generate_request(prompt, options)
        return SyncStream(self, self._rpc.Generate, request, options.get("timeout_s", ANSWER_TIMEOUT_S))

    def complete_chat(self, conversation: Conversation, **options: Unpack[ChatOptions]) -> Answer:
        """As chat, but whole and with its usage."""
        return self.chat(conversation, **options).whole()

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """As generate, but whole and with its usage."""
        return self.generate(prompt, **options).whole()

    def count_tokens(self, conversation: Conversation, *, model: str = "") -> TokenCount:
        """What a conversation would take of the context. Generates nothing."""
        chat = chat_request(conversation, {"model": model or self.default_model()})
        with status_as_failure():
            response = self._rpc.CountTokens(
                pb.CountTokensRequest(chat=chat), timeout=LOOKUP_TIMEOUT_S, metadata=self.metadata
            )
        return token_count_of(response)

    def models(self) -> tuple[Model, ...]:
        """The models that the mesh serves now."""
        with status_as_failure():
            response = self._rpc.ListModels(pb.ListModelsRequest(), timeout=LOOKUP_TIMEOUT_S, metadata=self.metadata)
        return models_of(response)

    def default_model(self) -> str:
        """The model used where none is named. Asked once; ShoalClientError unless there is exactly one."""
        if self._model is None:
            self._model = only_model(self.models())
        return self._model
