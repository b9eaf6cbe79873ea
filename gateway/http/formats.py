"""The two shapes in which OpenAI writes answers: chat and text completions, streamed and whole.

A streamed chunk is a constant head and tail around the JSON of its text: encoding the same object for every token would
be most of the cost of a token here.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gateway.request import ChoiceFinished, Completed, Delta, Finish, TokenInfo

REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}
# JSON has no minus infinity; OpenAI writes this.
_LEAST = -9999.0

encode = msgspec.json.encode


class Format(Protocol):
    """What differs between the endpoints."""

    chunk_object: str
    whole_object: str

    def opening(self, choice: int) -> dict[str, Any] | None:
        """A choice's first chunk, if it has one of its own."""

    def frame(self, choice: int) -> tuple[bytes, bytes]:
        """JSON around a chunk's text, without log-probabilities."""

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A chunk's choice with log-probabilities."""

    def closing(self, end: ChoiceFinished) -> dict[str, Any]:
        """A choice's last chunk."""

    def whole(self, choice: int, text: str, infos: Sequence[TokenInfo] | None, reason: str) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""


class ChatFormat:
    """/v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, choice: int) -> dict[str, Any] | None:
        return _chat_chunk(choice, {"role": "assistant", "content": ""})

    def frame(self, choice: int) -> tuple[bytes, bytes]:
        head = b'{"index":%d,"delta":{"content":' % choice
        return head, b'},"logprobs":null,"finish_reason":null}'

    def piece(self, delta: Delta) -> dict[str, Any]:
        chunk = _chat_chunk(delta.choice, {"content": delta.text})
        return {**chunk, "logprobs": chat_logprobs(delta.logprobs)}

    def closing(self, end: ChoiceFinished) -> dict[str, Any]:
        return {**_chat_chunk(end.choice, {}), "finish_reason": REASONS[end.reason]}

    def whole(self, choice: int, text: str, infos: Sequence[TokenInfo] | None, reason: str) -> dict[str, Any]:
        return {
            "index": choice,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if infos is None else chat_logprobs(infos),
            "finish_reason": reason,
        }


def _chat_chunk(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionFormat:
    """/v1/completions."""

    chunk_object = whole_object = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def opening(self, choice: int) -> dict[str, Any] | None:
        return None

    def frame(self, choice: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"text":' % choice, b',"logprobs":null,"finish_reason":null}'

    def piece(self, delta: Delta) -> dict[str, Any]:
        offset = self._offsets.get(delta.choice, 0)
        self._offsets[delta.choice] = offset + sum(len(info.text) for info in delta.logprobs)
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.logprobs, offset),
            "finish_reason": None,
        }

    def closing(self, end: ChoiceFinished) -> dict[str, Any]:
        return {"index": end.choice, "text": "", "logprobs": None, "finish_reason": REASONS[end.reason]}

    def whole(self, choice: int, text: str, infos: Sequence[TokenInfo] | None, reason: str) -> dict[str, Any]:
        logprobs = None if infos is None else completion_logprobs(infos, 0)
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}


def chat_logprobs(infos: Sequence[TokenInfo]) -> dict[str, Any]:
    content = [{**_token(info), "top_logprobs": [_token(top) for top in info.top]} for info in infos]
    return {"content": content, "refusal": None}


def _token(info: TokenInfo) -> dict[str, Any]:
    return {"token": info.text, "logprob": max(info.logprob, _LEAST), "bytes": list(info.raw)}


def completion_logprobs(infos: Sequence[TokenInfo], offset: int) -> dict[str, Any]:
    """`offset` is the place of the first token in the choice's text, in characters."""
    offsets = []
    for info in infos:
        offsets.append(offset)
        offset += len(info.text)
    return {
        "tokens": [info.text for info in infos],
        "token_logprobs": [max(info.logprob, _LEAST) for info in infos],
        "top_logprobs": [{top.text: max(top.logprob, _LEAST) for top in info.top} for info in infos],
        "text_offset": offsets,
    }


def usage_json(completed: Completed) -> dict[str, Any]:
    """OpenAI's fields, and ours beside them (docs/api.md)."""
    usage = completed.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_by_tier": {"device": 0, "shared": 0} | usage.cached_by_tier,
        },
        "recomputed_tokens": usage.recomputed_tokens,
        "precision": usage.precision,
        "timing": {
            "queue_ms": completed.queue_ms,
            "worker_queue_ms": usage.queue_ms,
            "first_token_ms": usage.first_token_ms,
            "steps": usage.steps,
            "median_step_ms": usage.median_step_ms,
            "max_step_ms": usage.max_step_ms,
        },
    }
