"""What the client gives back: plain frozen dataclasses, no protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely it was (natural logarithm). `top` lists the likeliest at its place, best first."""

    token_id: int
    logprob: float
    text: str
    raw: bytes
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model makes, or in a stream a piece of one: pieces are joined by `index`. `arguments` is JSON."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """More of one choice; joined texts are the answer. `finish` comes with a choice's last piece, which has no text."""

    text: str = ""
    choice: int = 0
    finish: FinishReason | None = None
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the whole request. `cached_tokens` of the prompt were found rather than computed, `cached_by_tier` says
    where. Times are the workers', in milliseconds: until its first step and token, and of the `steps` that carried it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict, hash=False)
    precision: str = ""
    queue_ms: int = 0
    first_token_ms: int = 0
    steps: int = 0
    median_step_ms: float = 0.0
    max_step_ms: float = 0.0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Started:
    """The head of an answer. `simulated`: a timing model stands in for a real engine."""

    request_id: str
    client_request_id: str
    model: str
    created_unix_s: int
    simulated: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of an answer that ended well. `attempts` above 1: it was moved to another worker on the way."""

    usage: Usage
    queue_ms: int
    attempts: int
    worker: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    index: int
    text: str
    finish: FinishReason | None
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of a request, with what it used."""

    choices: tuple[Choice, ...]
    started: Started
    summary: Summary

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def usage(self) -> Usage:
        return self.summary.usage


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Prompt plus answer may not pass `context_tokens`."""

    prompt_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model that at least one worker serves now."""

    name: str
    context_tokens: int
    workers: int
    simulated: bool


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: str = field(default='{"type": "object"}')
