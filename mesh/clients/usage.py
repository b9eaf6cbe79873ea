"""What a request used, as a plain value that the worker's, the scheduler's and the public contract share."""

import msgspec

from shoal.types.v1 import types_pb2

# What users read for a KvTier value: device, host, disk, shared.
TIERS: dict[int, str] = {value: name.removeprefix("KV_TIER_").lower() for name, value in types_pb2.KvTier.items()}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens counted where they are made. `cached` maps a KvTier value (1 = device) to prompt tokens found there."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[int, int] = {}
    recomputed_tokens: int = 0
    precision: str = ""
    queue_ms: int = 0
    first_token_ms: int = 0
    steps: int = 0
    median_step_ms: float = 0.0
    max_step_ms: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in any tier."""
        return sum(self.cached.values())

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """The same by the tier's name; one that a newer peer names is "unspecified"."""
        named: dict[str, int] = {}
        for tier, tokens in sorted(self.cached.items()):
            name = TIERS.get(tier, TIERS[0])
            named[name] = named.get(name, 0) + tokens
        return named


def usage_of(message: types_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached={part.tier: part.tokens for part in message.cached},
        recomputed_tokens=message.recomputed_tokens,
        precision=message.precision,
        queue_ms=message.queue_ms,
        first_token_ms=message.first_token_ms,
        steps=message.steps,
        median_step_ms=round(message.median_step_ms, 2),  # 4 bytes on the wire: 7.6 comes as 7.599999904632568
        max_step_ms=round(message.max_step_ms, 2),
    )


def usage_to_proto(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached=[
            types_pb2.CachedTokens(tier=types_pb2.KvTier.ValueType(tier), tokens=tokens)
            for tier, tokens in usage.cached.items()
        ],
        recomputed_tokens=usage.recomputed_tokens,
        precision=usage.precision,
        queue_ms=usage.queue_ms,
        first_token_ms=usage.first_token_ms,
        steps=usage.steps,
        median_step_ms=usage.median_step_ms,
        max_step_ms=usage.max_step_ms,
    )
