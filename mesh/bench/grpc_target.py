"""Shoal's own gRPC as a target, by the thin client that users have."""

import asyncio
import time
from collections.abc import Callable

import shoal
from mesh.bench.answer import Ask, Outcome
from mesh.bench.report import CannotMeasure
from mesh.bench.target import TEMPERATURE, TargetOptions
from shoal.request import Options


class GrpcTarget:
    """A gateway's gRPC address. Use it as `async with`."""

    def __init__(self, address: str, options: TargetOptions) -> None:
        self._client = shoal.Client(address, model=options.model, api_key=options.api_key, tls=options.ca)
        self._options = options

    async def __aenter__(self) -> "GrpcTarget":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, ask: Ask, outcome: Outcome, gap: Callable[[float], None]) -> None:
        """One request to its end, whatever that is: failures are told in `outcome`."""
        stream = self._stream(ask)
        try:
            async for piece in stream:
                now = time.perf_counter()
                outcome.finish = piece.finish or outcome.finish
                if not (piece.text or piece.reasoning):
                    continue
                if outcome.last is None:
                    outcome.first = now
                else:
                    gap(now - outcome.last)
                outcome.last = now
                outcome.pieces += 1
        except shoal.ShoalClientError as error:
            outcome.fail(f"grpc {type(error).__name__}", error.message)
            return
        if stream.summary is None:
            outcome.fail("no end", "the stream ended without its summary")
            return
        usage = stream.summary.usage
        outcome.prompt_tokens, outcome.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        outcome.cached_tokens = usage.cached_tokens
        outcome.check_whole(ask.output_tokens, exact=self._options.ignore_eos)

    def _stream(self, ask: Ask) -> shoal.Stream:
        told = Options(
            max_tokens=ask.output_tokens,
            temperature=TEMPERATURE,
            ignore_eos=self._options.ignore_eos,
            timeout_s=self._options.timeout_s,
        )
        if self._options.api == "chat" and isinstance(ask.prompt, str):
            return self._client.chat(ask.prompt, **told)
        return self._client.generate(ask.prompt, **told)


def models_of_grpc(address: str, api_key: str | None, ca: str | None) -> tuple[shoal.Model, ...]:
    """What ListModels lists. Raises CannotMeasure if no gateway answers there."""

    async def ask() -> tuple[shoal.Model, ...]:
        async with shoal.Client(address, api_key=api_key, tls=ca) as client:
            return await client.models()

    try:
        found = asyncio.run(ask())
    except shoal.ShoalClientError as error:
        raise CannotMeasure(f"no gateway answers at {address}: {error.message}") from None
    if not found:
        raise CannotMeasure(f"{address} serves no model now: is a worker up?")
    return found
