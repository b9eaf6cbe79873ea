"""One choice of an answer, carried over any number of attempts: its ids, its text, and how it ended."""

from collections.abc import Callable, Sequence

from gateway.prompt.text_model import TextModel
from gateway.request import Delta, Finish, TokenInfo
from gateway.stream import ChoiceText
from mesh.clients.attempt import ChoiceEnd, Logprob, Tokens

# Turns what the worker says of tokens into what a client is told of them.
Describe = Callable[[Logprob], TokenInfo]


class ChoiceState:
    """`ids` is all that came from workers, held-back text included: what a next attempt goes on from.

    `kept` is set once a stop string is complete: the output tokens that count. `reason` is set at the end.
    """

    def __init__(self, index: int, text: ChoiceText, describe: Describe, *, watched: bool) -> None:
        self.index = index
        self.ids: list[int] = []
        self.kept: int | None = None
        self.reason: Finish | None = None
        self._text = text
        self._describe = describe
        self._watched = watched
        self._held: list[int] = []
        self._held_infos: list[TokenInfo] = []
        self._counted: int | None = None

    @property
    def completion_tokens(self) -> int:
        """Output tokens that count: the worker's final figure, or as many as have come."""
        if self.kept is not None:
            return self.kept
        return len(self.ids) if self._counted is None else self._counted

    def push(self, tokens: Tokens) -> Delta | None:
        """More tokens; what of them the client may have now."""
        self.ids.extend(tokens.ids)
        if self.kept is not None:
            return None  # on its way when the stop was found
        if not self._watched:
            infos = tuple(map(self._describe, tokens.logprobs)) if tokens.logprobs else ()
            return Delta(self.index, self._text.push(tokens.ids).text, tokens.ids, infos)
        return self._push_watched(tokens)

    def _push_watched(self, tokens: Tokens) -> Delta | None:
        """Ids and log-probabilities wait with their text: those of a stop string are never told."""
        texts: list[str] = []
        ids: list[int] = []
        infos: list[TokenInfo] = []
        for at, token in enumerate(tokens.ids):
            piece = self._text.push((token,))
            if piece.text and piece.stopped:
                self._release(ids, infos)
            self._held.append(token)
            if tokens.logprobs:
                self._held_infos.append(self._describe(tokens.logprobs[at]))
            texts.append(piece.text)
            if piece.stopped:
                self.kept = piece.keep_tokens
                break
            if piece.text:
                self._release(ids, infos)
        text = "".join(texts)
        return Delta(self.index, text, ids, infos) if text or ids else None

    def _release(self, ids: list[int], infos: list[TokenInfo]) -> None:
        ids += self._held
        infos += self._held_infos
        self._held, self._held_infos = [], []

    def end(self, end: ChoiceEnd) -> Delta | None:
        """The worker ended it; what was still held, if anything."""
        if self.kept is not None:
            self.reason = Finish.STOP
            return None
        self._counted = end.completion_tokens
        piece = self._text.finish()
        if piece.stopped:
            self.kept = piece.keep_tokens
        self.reason = Finish.STOP if piece.stopped else Finish(end.reason)
        ids: list[int] = []
        infos: list[TokenInfo] = []
        if not piece.stopped:
            self._release(ids, infos)
        return Delta(self.index, piece.text, ids, infos) if piece.text or ids else None

    def end_stopped(self) -> bool:
        """The worker is gone; a choice whose stop string was complete has ended nevertheless. True if it just did."""
        if self.kept is None or self.reason is not None:
            return False
        self.reason = Finish.STOP
        return True


def unfinished(choices: Sequence[ChoiceState]) -> dict[int, Sequence[int]]:
    """Index and emitted ids of each choice that still runs: what a next attempt is asked for."""
    return {choice.index: choice.ids for choice in choices if choice.reason is None}


def token_info(model: TextModel, logprob: Logprob) -> TokenInfo:
    """A token as a client is told of it."""
    top = tuple(TokenInfo(token, value, *model.token_text(token)) for token, value in logprob.top)
    return TokenInfo(logprob.token_id, logprob.logprob, *model.token_text(logprob.token_id), top)
