"""OpenAI's request bodies as typed structs, and what they ask for in our own words.

A field that is not listed is refused by name: an answer must not silently ignore what was asked. Fields that ask for
nothing we could leave out (bookkeeping of OpenAI's own) are listed as ignored. Types are checked here, values in
gateway/validate.py.
"""

from typing import Any

import msgspec

from gateway.http.structures import ResponseFormat, StructuredOutputs, Wanted, wanted_of
from gateway.request import Asked, Route
from mesh.errors import InvalidRequest, ShoalError
from mesh.sampling import Sampling

REQUEST_ID_HEADER = "x-request-id"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: we pad nothing


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. None = absent or null."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    structured_outputs: StructuredOutputs | None = None
    # Ours.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: str | None = None
    session_id: str | None = None
    # Ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, top_logprobs: int | None) -> Sampling:
        """What of the sampling was given; max_tokens is decided later."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if (wanted := self.wanted()) is not None:
            given[wanted.structure] = wanted.text
        return Sampling(
            max_tokens=0, top_logprobs=top_logprobs, stop_token_ids=tuple(self.stop_token_ids or ()), **given
        )

    def wanted(self) -> Wanted | None:
        """The structure that the answer must have. Raises InvalidRequest."""
        return wanted_of(self.response_format, self.structured_outputs)

    def named(self, error: ShoalError) -> ShoalError:
        """The error with this body's own name of the field that is wrong."""
        wanted = self.wanted() if isinstance(error, InvalidRequest) else None
        return error if wanted is None else wanted.named(error)

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for stream: true", field="stream_options")


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "ignore_eos",
)  # fmt: skip


class ChatBody(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions. `messages` and `tools` are read by gateway/prompt/messages.py."""

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None  # ignored: how many calls a model makes is its own affair

    def asked(self, client_request_id: str) -> Asked:
        self.check_stream()
        self._check_tool_choice()
        return Asked(
            route=Route.CHAT,
            model=self.model,
            messages=self.messages,
            tools=None if self.tool_choice == "none" else self.tools,
            sampling=self.sampling(self._top_logprobs()),
            max_tokens=self._max_tokens(),
            max_tokens_name="max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
            stop=self.stops(),
            choices=1 if self.n is None else self.n,
            priority="normal" if self.priority is None else self.priority,
            session_id=self.session_id or "",
            client_request_id=client_request_id,
            client_request_id_name=REQUEST_ID_HEADER,
        )

    def _max_tokens(self) -> int | None:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens are two names of one limit and differ",
                field="max_completion_tokens",
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _top_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
        return None

    def _check_tool_choice(self) -> None:
        if self.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice must be 'auto' or 'none'", field="tool_choice")


class CompletionBody(Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions. One prompt: a text, a list with one text, or a list of token ids."""

    prompt: str | list[str | int]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def asked(self, client_request_id: str) -> Asked:
        self.check_stream()
        self._check_unsupported()
        text, ids = self._prompt()
        return Asked(
            route=Route.COMPLETION,
            model=self.model,
            text=text,
            prompt_ids=ids,
            sampling=self.sampling(self._top_logprobs()),
            max_tokens=self.max_tokens,
            stop=self.stops(),
            choices=1 if self.n is None else self.n,
            priority="normal" if self.priority is None else self.priority,
            session_id=self.session_id or "",
            client_request_id=client_request_id,
            client_request_id_name=REQUEST_ID_HEADER,
        )

    def _prompt(self) -> tuple[str | None, list[str | int] | None]:
        """A text, or a list of ids of which nothing is checked yet: it may have millions."""
        if isinstance(self.prompt, str):
            return self.prompt, None
        if len(self.prompt) == 1 and isinstance(self.prompt[0], str):
            return self.prompt[0], None
        return None, self.prompt

    def _top_logprobs(self) -> int | None:
        if self.logprobs is not None and not 0 <= self.logprobs <= 5:
            raise InvalidRequest(f"logprobs must be from 0 to 5, not {self.logprobs}", field="logprobs")
        return self.logprobs

    def _check_unsupported(self) -> None:
        if self.echo:
            raise InvalidRequest("echo is not supported", field="echo")
        if self.suffix:
            raise InvalidRequest("suffix is not supported", field="suffix")
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequest("best_of must equal n: every answer that is made is returned", field="best_of")
