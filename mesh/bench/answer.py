"""One request of a load test and what came of it, and how a streamed answer's events are read.

Most events are only counted: of a token's chunk no more is looked at than a few bytes, which is what keeps the load
generator lean. Those that say something (the first text, the end, the usage, an error) are decoded and checked. A quote
inside a JSON text is escaped, so the bytes looked for cannot stand in an answer's own text.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

MOST_EVENT_BYTES = 1 << 20
_GOES_ON = (b'"finish_reason":null', b'"finish_reason": null')
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a text or a list of token ids, and how many tokens are wanted. `at_s` counts from the start."""

    prompt: str | list[int]
    output_tokens: int
    at_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one request went. Times are on the clock that the generator uses; `error` is "" for a whole answer.

    Latencies count from `due`, when the request should have left: a late generator does not hide a slow server.
    `raw`, if it is a list, gets the stream's bytes as they are read, for `text_of` once the run is over.
    """

    due: float
    sent: float
    first: float | None = None
    last: float | None = None
    ended: float = 0.0
    pieces: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    finish: str | None = None
    error: str = ""
    detail: str = ""
    raw: list[bytes] | None = None

    @classmethod
    def now(cls) -> "Outcome":
        """Of a request that leaves when it is due: now."""
        moment = time.perf_counter()
        return cls(due=moment, sent=moment)

    @property
    def tokens(self) -> int:
        """As the server counts them; a server that does not is credited with its pieces."""
        return self.pieces if self.completion_tokens is None else self.completion_tokens

    def fail(self, kind: str, detail: str = "") -> None:
        """The first failure is the one that counts."""
        if not self.error:
            self.error, self.detail = kind, detail[:300]

    def check_whole(self, wanted_tokens: int, *, exact: bool) -> None:
        """Fail an answer that lacks something. `exact`: the model's own end was to be ignored."""
        if self.error:
            return
        if self.finish is None:
            self.fail("no end", "the stream ended without a finish_reason")
        elif not self.pieces and not self.tokens:
            self.fail("empty answer")
        elif exact and self.tokens < wanted_tokens and self.completion_tokens is not None:
            self.fail("short answer", f"{self.tokens} of {wanted_tokens} tokens, finish_reason {self.finish}")


def text_of(outcome: Outcome) -> str:
    """The first choice's text, of an outcome that kept its stream. Raises ValueError if it did not, or is malformed."""
    if outcome.raw is None:
        raise ValueError("the stream's bytes were not kept")
    events = b"".join(outcome.raw).replace(b"\r\n", b"\n").split(b"\n\n")
    found = []
    for event in events:
        data = event.removeprefix(b"data:").strip()
        if data and data != _DONE and event.startswith(b"data:"):
            found += [choice.words for choice in (_EVENT.decode(data).choices or ())[:1]]
    return "".join(found)


class SseReader:
    """Reads the events of one streamed answer into its Outcome. `gap` hears the seconds between pieces of text."""

    __slots__ = ("_gap", "_open", "_outcome", "_rest", "done")

    def __init__(self, outcome: Outcome, gap: Callable[[float], None]) -> None:
        self._outcome = outcome
        self._gap = gap
        self._rest = b""
        self._open = False  # text has come
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """Take the bytes that were read at `now`."""
        if self._outcome.raw is not None:
            self._outcome.raw.append(data)
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MOST_EVENT_BYTES:
            self._outcome.fail("oversized event")
            self._rest = b""
        for event in events:
            if self._open and (_GOES_ON[0] in event or _GOES_ON[1] in event):
                self._piece(now)
            else:
                self._event(event, now)

    def _piece(self, now: float) -> None:
        outcome = self._outcome
        outcome.pieces += 1
        if outcome.last is not None:
            self._gap(now - outcome.last)
        outcome.last = now

    def _event(self, event: bytes, now: float) -> None:
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data:
            return  # a comment or an event without data
        if data == _DONE:
            self.done = True
            return
        try:
            self._decoded(_EVENT.decode(data), now)
        except (msgspec.DecodeError, RecursionError) as error:
            self._outcome.fail("malformed event", str(error))

    def _decoded(self, event: "_Event", now: float) -> None:
        if event.error:
            error = event.error if isinstance(event.error, dict) else {"message": str(event.error)}
            self._outcome.fail(
                f"in-band {error.get('code') or error.get('type') or 'error'}", str(error.get("message"))
            )
        for choice in event.choices or ():
            if choice.says:
                if not self._open:
                    self._open = True
                    self._outcome.first = now
                self._piece(now)
            self._outcome.finish = choice.finish_reason or self._outcome.finish
        if event.usage is not None:
            self._count(event.usage)

    def _count(self, usage: "_Usage") -> None:
        outcome, details = self._outcome, usage.prompt_tokens_details
        outcome.prompt_tokens = usage.prompt_tokens
        outcome.completion_tokens = usage.completion_tokens
        outcome.cached_tokens = (details.cached_tokens or 0) if details is not None else 0


# What is read of an event; servers write null where they have nothing to say.
_Tokens = Annotated[int, msgspec.Meta(ge=0)] | None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """Of a chat, of its reasoning, or of a completion."""

    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        """Its piece of the answer, without reasoning."""
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    @property
    def says(self) -> bool:
        """Whether it carries text."""
        delta = self.delta
        return bool(self.text or (delta is not None and (delta.content or delta.reasoning_content)))


class _Details(msgspec.Struct):
    cached_tokens: _Tokens = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens = None
    completion_tokens: _Tokens = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    error: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


_EVENT = msgspec.json.Decoder(_Event)
