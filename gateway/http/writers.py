"""An answer's events as the bytes of an HTTP body: one event stream, or one JSON object at the end."""

from typing import Any, Protocol

from gateway.http.exchange import DONE, Reply
from gateway.http.formats import REASONS, Format, encode, usage_json
from gateway.request import ChoiceFinished, Completed, Delta, Event, Request, Started, TokenInfo


class Writer(Protocol):
    async def write(self, event: Event) -> None:
        """Take one event; Completed ends the body."""


class StreamWriter:
    """Server-sent events. What ends together leaves together: the last chunks, the usage and [DONE] are one send."""

    def __init__(self, reply: Reply, form: Format, request: Request, *, include_usage: bool) -> None:
        self._reply = reply
        self._form = form
        self._head = encode(
            {
                "id": request.request_id,
                "object": form.chunk_object,
                "created": request.created_unix_s,
                "model": request.model,
            }
        )[:-1]
        # OpenAI: with include_usage every chunk has the field, null but in the last one.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage
        self._frames = [self._frame(choice) for choice in range(request.choices)]
        self._unopened = set(range(request.choices))
        self._running = request.choices
        self._ready: list[bytes] = []

    def _frame(self, choice: int) -> tuple[bytes, bytes]:
        head, tail = self._form.frame(choice)
        return b"data: " + self._head + b',"choices":[' + head, tail + self._tail

    async def write(self, event: Event) -> None:
        if isinstance(event, Delta):
            await self._delta(event)
        elif isinstance(event, ChoiceFinished):
            await self._finished(event)
        elif isinstance(event, Completed):
            await self._completed(event)
        elif isinstance(event, Started):
            await self._reply.commit()

    async def _delta(self, delta: Delta) -> None:
        if delta.logprobs:
            chunk = self._chunk(self._form.piece(delta))
        elif delta.text:
            head, tail = self._frames[delta.choice]
            chunk = head + encode(delta.text) + tail
        else:
            return
        if self._unopened:
            self._open(delta.choice)
        if self._ready:
            chunk = b"".join((*self._ready, chunk))
            self._ready.clear()
        await self._reply.write(chunk)

    async def _finished(self, end: ChoiceFinished) -> None:
        self._open(end.choice)
        self._ready.append(self._chunk(self._form.closing(end)))
        self._running -= 1
        if self._running:
            await self._reply.write(b"".join(self._ready))
            self._ready.clear()

    async def _completed(self, completed: Completed) -> None:
        if self._include_usage:
            usage = encode(usage_json(completed))
            self._ready.append(b"data: " + self._head + b',"choices":[],"usage":' + usage + b"}\n\n")
        await self._reply.last(b"".join((*self._ready, DONE)))

    def _open(self, choice: int) -> None:
        if choice in self._unopened:
            self._unopened.discard(choice)
            opening = self._form.opening(choice)
            if opening is not None:
                self._ready.append(self._chunk(opening))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return b"data: " + self._head + b',"choices":[' + encode(choice) + self._tail


class WholeWriter:
    """Collects the answer and sends it in one piece."""

    def __init__(self, reply: Reply, form: Format, request: Request) -> None:
        self._reply = reply
        self._form = form
        self._request = request
        self._texts: list[list[str]] = [[] for _ in range(request.choices)]
        self._infos: list[list[TokenInfo]] = [[] for _ in range(request.choices)]
        self._reasons = [""] * request.choices

    async def write(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._texts[event.choice].append(event.text)
            self._infos[event.choice].extend(event.logprobs)
        elif isinstance(event, ChoiceFinished):
            self._reasons[event.choice] = REASONS[event.reason]
        elif isinstance(event, Completed):
            await self._reply.whole(200, encode(self._answer(event)))

    def _answer(self, completed: Completed) -> dict[str, Any]:
        request = self._request
        asked = request.sampling.top_logprobs is not None
        choices = [
            self._form.whole(index, "".join(texts), self._infos[index] if asked else None, self._reasons[index])
            for index, texts in enumerate(self._texts)
        ]
        return {
            "id": request.request_id,
            "object": self._form.whole_object,
            "created": request.created_unix_s,
            "model": request.model,
            "choices": choices,
            "usage": usage_json(completed),
        }
