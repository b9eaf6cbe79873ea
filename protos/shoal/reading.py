"""From protobuf responses to the client's dataclasses; the asynchronous and the synchronous client share it."""

from collections.abc import Iterable

from shoal.answer import (
    Answer,
    Choice,
    FinishReason,
    Model,
    Piece,
    Started,
    Summary,
    TokenCount,
    TokenLogprob,
    ToolCall,
    Usage,
)
from shoal.failure import ShoalClientError
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.types.v1 import types_pb2

_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class Reading:
    """The state of one stream: its pieces come out of `read`, its head and end are kept."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.summary: Summary | None = None

    def read(self, response: pb.GenerateResponse) -> Piece | None:
        """The piece in a response; None where it carries none. An event of a newer mesh is passed over."""
        match response.WhichOneof("event"):
            case "started":
                self.started = _started(response.started)
            case "delta":
                return _piece(response.delta)
            case "finished":
                finished = response.finished
                return Piece(choice=finished.choice, finish=_REASONS.get(finished.reason, "error"))
            case "completed":
                self.summary = _summary(response.completed)
        return None

    def answer(self, pieces: Iterable[Piece]) -> Answer:
        """The whole of a stream that ended. Raises ShoalClientError if it ended without its last message."""
        if self.started is None or self.summary is None:
            raise ShoalClientError("the answer ended before its last message")
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.choice, []).append(piece)
        choices = tuple(_choice(index, by_choice[index]) for index in sorted(by_choice))
        return Answer(choices, self.started, self.summary)


def token_count_of(response: pb.CountTokensResponse) -> TokenCount:
    return TokenCount(response.prompt_tokens, response.context_tokens)


def models_of(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(Model(m.name, m.context_tokens, m.workers, m.simulated) for m in response.models)


def only_model(models: tuple[Model, ...]) -> str:
    """The name to use when the caller gave none. Raises ShoalClientError unless exactly one is served."""
    if len(models) == 1:
        return models[0].name
    names = ", ".join(model.name for model in models)
    raise ShoalClientError(f"say which model: {names} are served" if models else "no worker serves a model now")


def _choice(index: int, pieces: list[Piece]) -> Choice:
    return Choice(
        index=index,
        text="".join(piece.text for piece in pieces),
        finish=next((piece.finish for piece in pieces if piece.finish is not None), None),
        reasoning="".join(piece.reasoning for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        tool_calls=_joined(call for piece in pieces for call in piece.tool_calls),
    )


def _joined(pieces: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        so_far = calls.get(piece.index, ToolCall(piece.index, "", "", ""))
        calls[piece.index] = ToolCall(
            piece.index, so_far.id or piece.id, so_far.name + piece.name, so_far.arguments + piece.arguments
        )
    return tuple(calls[index] for index in sorted(calls))


def _piece(delta: pb.Delta) -> Piece:
    return Piece(
        text=delta.text,
        choice=delta.choice,
        reasoning=delta.reasoning,
        token_ids=tuple(delta.token_ids),
        logprobs=tuple(map(_logprob, delta.logprobs)),
        tool_calls=tuple(ToolCall(call.index, call.id, call.name, call.arguments) for call in delta.tool_calls),
    )


def _logprob(message: types_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple(map(_logprob, message.top))
    return TokenLogprob(message.token_id, message.logprob, message.text, message.raw, top)


def _started(message: pb.Started) -> Started:
    return Started(
        message.request_id, message.client_request_id, message.model, message.created_unix_s, message.simulated
    )


def _summary(message: pb.Completed) -> Summary:
    return Summary(_usage(message.usage), message.queue_ms, message.attempts, message.worker)


def _usage(message: types_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=sum(cached.tokens for cached in message.cached),
        recomputed_tokens=message.recomputed_tokens,
        cached_by_tier=_by_tier(message),
        precision=message.precision,
        queue_ms=message.queue_ms,
        first_token_ms=message.first_token_ms,
        steps=message.steps,
        median_step_ms=round(message.median_step_ms, 2),
        max_step_ms=round(message.max_step_ms, 2),
    )


def _by_tier(message: types_pb2.Usage) -> dict[str, int]:
    named: dict[str, int] = {}
    for cached in message.cached:
        name = _TIERS.get(cached.tier, _TIERS[0])
        named[name] = named.get(name, 0) + cached.tokens
    return named


# As the HTTP API names them; a tier that is newer than this client is "unspecified".
_TIERS: dict[int, str] = {tier: name.removeprefix("KV_TIER_").lower() for name, tier in types_pb2.KvTier.items()}
