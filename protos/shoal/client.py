"""The asynchronous client of a mesh: one channel, typed answers, errors of shoal.failure.

    async with shoal.Client("localhost:50051") as client:
        async for piece in client.chat("What is the capital of Japan?", temperature=0):
            print(piece.text, end="")

shoal.SyncClient is its synchronous twin. What is asked and what is understood is in shoal.request and shoal.reading;
the two clients only move messages.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import grpc

from shoal.answer import Answer, Model, Piece, TokenCount
from shoal.channel import ClientTls, channel_options, trust
from shoal.failure import status_as_failure
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.gateway.v1 import gateway_pb2_grpc as rpc
from shoal.reading import Reading, models_of, only_model, token_count_of
from shoal.request import ChatOptions, Conversation, Options, Prompt, chat_request, generate_request

ANSWER_TIMEOUT_S = 600.0  # where a call names none
LOOKUP_TIMEOUT_S = 10.0  # a call that generates nothing

Method: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[Any, pb.GenerateResponse]"


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a key; empty without one."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class Stream(Reading):
    """An answer as it comes. Iterate it once: the call starts then, and is cancelled when you stop early.

    `started` is known from the first piece on, `summary` after the last. Iterating raises ShoalClientError.
    """

    def __init__(
        self, client: "Client", method: Method, request: pb.ChatRequest | pb.GenerateRequest, timeout_s: float
    ) -> None:
        super().__init__()
        self._client = client
        self._method = method
        self._request = request
        self._timeout_s = timeout_s

    async def __aiter__(self) -> AsyncIterator[Piece]:
        self._request.model = self._request.model or await self._client.default_model()
        call = self._method(self._request, timeout=self._timeout_s, metadata=self._client.metadata)
        try:
            with status_as_failure():
                async for response in call:
                    piece = self.read(response)
                    if piece is not None:
                        yield piece
        finally:
            call.cancel()  # does nothing to a call that ended; without it the mesh would go on for nobody

    async def whole(self) -> Answer:
        """All of it at once."""
        return self.answer([piece async for piece in self])


class Client:
    """A connection to a mesh's gateway, "host:port". Close it, or use it as `async with`.

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
            self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        else:
            options = (*channel_options(), *secure.options())
            self._channel = grpc.aio.secure_channel(address, secure.credentials(), options=options)
        self._rpc = rpc.InferenceServiceStub(self._channel)
        self._model = model
        self.metadata = bearer(api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs and close the connection."""
        await self._channel.close()

    def chat(self, conversation: Conversation, **options: Unpack[ChatOptions]) -> Stream:
        """The answer to a question or a list of turns, piece by piece."""
        request = chat_request(conversation, options)
        return Stream(self, self._rpc.Chat, request, options.get("timeout_s", ANSWER_TIMEOUT_S))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The continuation of a text or of token ids, piece by piece."""
        request = generate_request(prompt, options)
        return Stream(self, self._rpc.Generate, request, options.get("timeout_s", ANSWER_TIMEOUT_S))

    async def complete_chat(self, conversation: Conversation, **options: Unpack[ChatOptions]) -> Answer:
        """As chat, but whole and with its usage."""
        return await self.chat(conversation, **options).whole()

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """As generate, but whole and with its usage."""
        return await self.generate(prompt, **options).whole()

    async def count_tokens(self, conversation: Conversation, *, model: str = "") -> TokenCount:
        """What a conversation would take of the context. Generates nothing."""
        chat = chat_request(conversation, {"model": model or await self.default_model()})
        with status_as_failure():
            response = await self._rpc.CountTokens(
                pb.CountTokensRequest(chat=chat), timeout=LOOKUP_TIMEOUT_S, metadata=self.metadata
            )
        return token_count_of(response)

    async def models(self) -> tuple[Model, ...]:
        """The models that the mesh serves now."""
        with status_as_failure():
            response = await self._rpc.ListModels(
                pb.ListModelsRequest(), timeout=LOOKUP_TIMEOUT_S, metadata=self.metadata
            )
        return models_of(response)

    async def default_model(self) -> str:
        """The model used where none is named. Asked once; ShoalClientError unless there is exactly one."""
        if self._model is None:
            self._model = only_model(await self.models())
        return self._model
