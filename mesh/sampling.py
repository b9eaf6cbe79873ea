"""How the next token is chosen, as plain data, and the one place that says which values are allowed.

The gateway checks a request here before admission, the worker again before a step (it trusts no peer).
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from mesh.errors import InvalidRequest
from shoal.types.v1 import types_pb2

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
# Logits are divided by it: far smaller ones would leave the range of fp32. This is 0.01 as the wire's fp32 rounds it.
LEAST_REPETITION_PENALTY = 0.009999999776482582
# The wire's fp32 makes 0 of what is much smaller.
LEAST_TOP_P = 2.0**-149
# Of a schema, regular expression or grammar, in UTF-8.
MAX_STRUCTURE_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64

# What may constrain an answer, by the names that fields have.
Structure = Literal["json_schema", "regex", "grammar"]
STRUCTURES: tuple[Structure, ...] = ("json_schema", "regex", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """One request's sampling. Defaults are the contract's (types.proto); `seed` None = not yet fixed."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, on a value that no step could honour."""
        for name, low, high in _RANGES:
            _in_range(name, getattr(self, name), low, high)
        if not LEAST_TOP_P <= self.top_p <= 1:
            least = f"above 0 (at least {LEAST_TOP_P:.1g}) and at most 1"
            raise InvalidRequest(f"top_p must be {least}, not {self.top_p}", field="top_p")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.max_tokens}", field="max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(f"min_tokens must be from 0 to max_tokens, not {self.min_tokens}", field="min_tokens")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InvalidRequest(f"seed must be from 0 to 2^64-1, not {self.seed}", field="seed")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens", field="logit_bias")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", field="stop_token_ids")
        for token, bias in self.logit_bias.items():
            _in_vocabulary("logit_bias", token, vocab_size)
            _in_range("logit_bias", bias, -100, 100)
        for token in self.stop_token_ids:
            _in_vocabulary("stop_token_ids", token, vocab_size)
        self._check_structure()

    @property
    def structure(self) -> tuple[Structure, str] | None:
        """What constrains the answer, and its text."""
        return next(((name, text) for name in STRUCTURES if (text := getattr(self, name)) is not None), None)

    def _check_structure(self) -> None:
        """What can be said of it without compiling it, which is for the worker."""
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{given[0]} and {given[1]}: an answer has one structure", field=given[1])
        for name in given:
            text = getattr(self, name)
            if not text or len(text) > MAX_STRUCTURE_BYTES or len(text.encode()) > MAX_STRUCTURE_BYTES:
                raise InvalidRequest(f"{name} must have 1 to {MAX_STRUCTURE_BYTES} bytes", field=name)
            if self.ignore_eos:
                raise InvalidRequest(f"ignore_eos: an answer with a {name} ends where that ends", field="ignore_eos")
        if self.json_schema is not None:
            _check_schema(self.json_schema)


_RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_k", 0, 1 << 31),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", LEAST_REPETITION_PENALTY, 2.0),
    ("top_logprobs", 0, MAX_TOP_LOGPROBS),
)


def _in_range(name: str, value: float | None, low: float, high: float) -> None:
    # Not-a-number fails every comparison; an integer of any size is compared exactly.
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {_plain(low)} to {_plain(high)}, not {value}", field=name)


def _plain(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _in_vocabulary(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name}: token id {token} is outside the vocabulary of {vocab_size}", field=name)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not JSON: {error}", field="json_schema") from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("json_schema must be a JSON object", field="json_schema")
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
    if level:
        raise InvalidRequest(f"json_schema is nested more than {MAX_SCHEMA_DEPTH} deep", field="json_schema")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


_OPTIONAL: tuple[Any, ...] = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "top_logprobs", "json_schema", "regex", "grammar",
)  # fmt: skip


def from_proto(message: types_pb2.SamplingParams) -> Sampling:
    """Plain sampling of a protobuf one; absent fields take their defaults (max_tokens 0). Checks nothing."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return Sampling(
        max_tokens=message.max_tokens,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        **given,
    )


def to_proto(sampling: Sampling) -> types_pb2.SamplingParams:
    """The protobuf twin; None fields stay absent."""
    message = types_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )
    for name in _OPTIONAL:
        if (value := getattr(sampling, name)) is not None:
            setattr(message, name, value)
    return message
