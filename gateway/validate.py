"""The one place that decides every limit, before admission. Both front doors come through here, so both say the same.

| field | rule |
|---|---|
| `model` | one that this gateway serves, else 400 `model_not_found` |
| `messages` | gateway/prompt/messages.py; one at least |
| `prompt` | one text or one list of token ids; empty is refused, ids must be in the vocabulary |
| prompt tokens | 1 to context - 1, else 400 `context_length_exceeded` |
| prompt's text | UTF-8 bytes at most context times the longest token's, else the same, before it is tokenized |
| `max_tokens` absent or null | what the context has left; 16 for `/v1/completions`, as OpenAI has it |
| `max_tokens` 0 or less | 400 |
| prompt + `max_tokens` > context | clamped to what is left; the answer then ends with "length" |
| `n` | 1 to 16 |
| `stop` | at most 16 texts of 1 to 256 characters (OpenAI takes 4) |
| `tools` | 400 where the model's template takes none |
| `priority` | high, normal or batch, not above the tenant's |
| `session_id`, client request id | at most 128 characters |
| sampling | mesh/sampling.py; a seed is drawn if none is given |
| `json_schema` | gateway/schemas.py; the worker refuses what it cannot compile |
"""

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gateway.catalogue import Catalogue
from gateway.prompt.messages import normalise, normalise_tools
from gateway.prompt.offload import Offload
from gateway.prompt.text_model import TextModel
from gateway.request import Asked, Request, Route, mint_id
from gateway.schemas import check_schema
from gateway.tenants import PRIORITIES, Tenant
from mesh.errors import DeadlineExceeded, InvalidRequest, PermissionDenied
from mesh.sampling import Sampling

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_NAME_CHARACTERS = 128
COMPLETION_MAX_TOKENS = 16
# Rendered and tokenized in half a millisecond.
INLINE_CHARACTERS = 1_000
INLINE_MESSAGES = 8


@dataclass(frozen=True, slots=True)
class Validator:
    """`timeout_s` bounds a request from its arrival to its end."""

    catalogue: Catalogue
    offload: Offload
    max_choices: int
    timeout_s: float

    async def request(self, asked: Asked, tenant: Tenant, timeout_s: float | None = None) -> Request:
        """A request ready for admission. Raises InvalidRequest that names the field, or PermissionDenied.

        `timeout_s` is the caller's own, where it has one; the shorter counts.
        """
        arrived = asyncio.get_running_loop().time()
        model = self.catalogue.text(asked.model)
        self._check_plain(asked)
        _check_priority(asked.priority, tenant)
        sampling = replace(asked.sampling, max_tokens=self._most(asked))
        sampling.check(model.vocab_size)
        if sampling.json_schema is not None:
            check_schema(sampling.json_schema)
        deadline = arrived + self._left_s(timeout_s)
        prompt_ids = await self._prompt_ids(asked, deadline)
        return Request(
            request_id=mint_id(asked.route),
            client_request_id=asked.client_request_id,
            route=asked.route,
            tenant=tenant,
            model=asked.model,
            priority=asked.priority,
            prompt_ids=prompt_ids,
            sampling=self._fitted(asked, sampling, len(prompt_ids)),
            stop=tuple(asked.stop),
            choices=asked.choices,
            session_id=asked.session_id,
            arrived=arrived,
            deadline=deadline,
            created_unix_s=int(time.time()),
        )

    async def count(self, asked: Asked, timeout_s: float | None = None) -> int:
        """Tokens of the prompt, which may be more than the context holds. Raises as `request` does."""
        return len(await self._prompt_ids(asked, asyncio.get_running_loop().time() + self._left_s(timeout_s)))

    def _left_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)

    async def _prompt_ids(self, asked: Asked, deadline: float) -> Sequence[int]:
        """The prompt as token ids. Raises InvalidRequest naming `messages…`, `tools` or `prompt`, DeadlineExceeded if
        tokenizing takes until `deadline` (the loop's time).
        """
        model, context = self.catalogue.text(asked.model), self.catalogue.context_tokens(asked.model)
        if asked.prompt_ids is not None:
            _check_ids(asked.prompt_ids, model.vocab_size, context)
            return asked.prompt_ids
        if _is_short(asked):
            return _encoded(asked, model, context)
        try:
            async with asyncio.timeout_at(deadline):
                return await self.offload.run(partial(_encoded, asked, model, context))
        except TimeoutError:
            raise DeadlineExceeded("the request's time was over before its prompt was tokenized") from None

    def _check_plain(self, asked: Asked) -> None:
        if not 1 <= asked.choices <= self.max_choices:
            raise InvalidRequest(f"n must be from 1 to {self.max_choices}, not {asked.choices}", field="n")
        if len(asked.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop takes at most {MAX_STOPS} texts", field="stop")
        for text in asked.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(f"each stop text must have 1 to {MAX_STOP_CHARACTERS} characters", field="stop")
        named = {"session_id": asked.session_id, asked.client_request_id_name: asked.client_request_id}
        for name, value in named.items():
            if len(value) > MAX_NAME_CHARACTERS:
                raise InvalidRequest(f"{name} must have at most {MAX_NAME_CHARACTERS} characters", field=name)

    def _most(self, asked: Asked) -> int:
        """max_tokens as given, or what its absence means on this route."""
        if asked.max_tokens is not None:
            if asked.max_tokens < 1:
                name = asked.max_tokens_name
                raise InvalidRequest(f"{name} must be at least 1, not {asked.max_tokens}", field=name)
            return asked.max_tokens
        if asked.route is Route.COMPLETION:
            return COMPLETION_MAX_TOKENS
        return self.catalogue.context_tokens(asked.model)

    def _fitted(self, asked: Asked, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """With a seed, and max_tokens clamped to what the context has left after the prompt."""
        context = self.catalogue.context_tokens(asked.model)
        left = context - prompt_tokens
        if left < 1:
            whole = context == self.catalogue.text(asked.model).context_tokens
            takes = "this model takes" if whole else "this model's workers, as they are set up, take"
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens; {takes} at most {context - 1}, so that one is left"
                " for the answer",
                field="messages" if asked.route is Route.CHAT else "prompt",
                code="context_length_exceeded",
            )
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        most = min(left, sampling.max_tokens)
        return replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most), seed=seed)


def _is_short(asked: Asked) -> bool:
    """Whether its prompt takes so little that sending it to a thread and back would cost as much (0.2 ms)."""
    if asked.route is not Route.CHAT:
        return len(asked.text or "") <= INLINE_CHARACTERS
    if asked.tools or not isinstance(asked.messages, list) or len(asked.messages) > INLINE_MESSAGES:
        return False
    contents = [turn.get("content") if isinstance(turn, dict) else None for turn in asked.messages]
    return sum(len(text) if isinstance(text, str) else math.inf for text in contents) <= INLINE_CHARACTERS


def _encoded(asked: Asked, model: TextModel, context_tokens: int) -> Sequence[int]:
    """The prompt in messages or text, checked and tokenized. For a thread if it is long: megabytes take seconds."""
    if asked.route is not Route.CHAT:
        if not asked.text:
            raise InvalidRequest("prompt must not be empty", field="prompt")
        return model.encode_text(asked.text, context_tokens)
    messages, tools = normalise(asked.messages), normalise_tools(asked.tools)
    if tools and not model.has_tools:
        raise InvalidRequest(f"{model.name}'s chat template takes no tools", field="tools")
    return model.encode_chat(messages, tools, context_tokens)


def _check_ids(ids: Sequence[Any], vocab_size: int, context_tokens: int) -> None:
    if not ids:
        raise InvalidRequest("prompt must not be empty", field="prompt")
    # Too many are refused by their number: looking at millions would hold up everyone.
    if len(ids) >= context_tokens:
        return
    if not all(isinstance(token, int) for token in ids):
        raise InvalidRequest("prompt must be one text or one list of token ids", field="prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        at, wrong = next((at, token) for at, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"prompt[{at}]: token id {wrong} is outside the vocabulary of {vocab_size}", field="prompt"
        )


def _check_priority(priority: str, tenant: Tenant) -> None:
    if priority not in PRIORITIES:
        raise InvalidRequest(f"priority must be one of {', '.join(PRIORITIES)}, not {priority!r}", field="priority")
    if not tenant.may_use(priority):
        raise PermissionDenied(
            f"this key may use priority {tenant.max_priority} and below, not {priority}", field="priority"
        )
