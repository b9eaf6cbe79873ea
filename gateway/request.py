"""A request after validation, and what an answer is made of: the language between front doors, validator and relay.

A front door turns its wire format into `Asked`; gateway/validate.py turns that into a `Request`, in which every limit
is decided; gateway/relay.py turns a Request into events, which the front door writes in its wire format.
"""

import secrets
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any

import msgspec

from gateway.tenants import Tenant
from mesh.clients.attempt import Meta
from mesh.clients.usage import Usage
from mesh.sampling import Sampling


class Route(Enum):
    """Which kind of call: how ids are spelled, what an absent max_tokens means, how the answer is written."""

    CHAT = "chat"
    COMPLETION = "completion"  # OpenAI's /v1/completions
    GENERATE = "generate"  # its gRPC twin


_ID_PREFIX = {Route.CHAT: "chatcmpl-", Route.COMPLETION: "cmpl-", Route.GENERATE: "gen-"}


def mint_id(route: Route) -> str:
    """A request id that nobody can guess or choose."""
    return _ID_PREFIX[route] + secrets.token_hex(16)


class Finish(IntEnum):
    """Why a choice ended, for a client. Values are those of shoal.types.v1.FinishReason."""

    STOP = 1
    LENGTH = 2


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a front door understood, unchecked.

    One of `messages` (OpenAI's JSON shape), `text` and `prompt_ids` is given. `max_tokens` None = absent; the one in
    `sampling` means nothing yet. `priority` is one of gateway.tenants.PRIORITIES or anything else a caller wrote.
    `…_name` is what the caller calls that field: what a refusal must name.
    """

    route: Route
    model: str
    sampling: Sampling
    messages: Any = None
    tools: Any = None
    text: str | None = None
    prompt_ids: Sequence[Any] | None = None
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"
    stop: Sequence[str] = ()
    choices: int = 1
    priority: str = "normal"
    session_id: str = ""
    client_request_id: str = ""
    client_request_id_name: str = "client_request_id"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Ready for admission. `sampling` has a seed and the final max_tokens; `arrived` and `deadline` are loop time."""

    request_id: str
    client_request_id: str
    route: Route
    tenant: Tenant
    model: str
    priority: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    stop: tuple[str, ...]
    choices: int
    session_id: str
    arrived: float
    deadline: float
    created_unix_s: int

    @property
    def meta(self) -> Meta:
        """Its identity on every hop."""
        left_s = self.deadline - self.arrived
        return Meta(
            request_id=self.request_id,
            tenant=self.tenant.name,
            model=self.model,
            priority=self.priority,
            deadline_unix_ms=round((self.created_unix_s + left_s) * 1000),
            client_request_id=self.client_request_id,
        )


class TokenInfo(msgspec.Struct, frozen=True):
    """A token and ln of its probability. `text` may hold replacement marks, `raw` is exact; `top` is best first."""

    token_id: int
    logprob: float
    text: str
    raw: bytes
    top: "tuple[TokenInfo, ...]" = ()


class Started(msgspec.Struct, frozen=True):
    """The first event, sent with the first result."""

    request_id: str
    model: str
    created_unix_s: int
    simulated: bool


class Delta(msgspec.Struct, frozen=True):
    """More of one choice: whole characters, and the ids received since the last Delta (their text may be held)."""

    choice: int
    text: str
    ids: Sequence[int]
    logprobs: Sequence[TokenInfo] = ()


class ChoiceFinished(msgspec.Struct, frozen=True):
    """The end of one choice; exactly one each."""

    choice: int
    reason: Finish


class Completed(msgspec.Struct, frozen=True):
    """The last event of an answer that ended well. `queue_ms` sums the waits for a place over `attempts`."""

    usage: Usage
    queue_ms: int
    attempts: int
    worker: str


Event = Started | Delta | ChoiceFinished | Completed
