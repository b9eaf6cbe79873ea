"""Usage as the contract has it, and by the names that users read."""

from mesh.clients.usage import Usage, usage_of, usage_to_proto
from shoal.types.v1 import types_pb2


def test_cached_tokens_have_the_names_of_their_tiers() -> None:
    usage = Usage(prompt_tokens=100, cached={types_pb2.KV_TIER_SHARED: 32, types_pb2.KV_TIER_DEVICE: 16})
    assert usage.cached_tokens == 48
    assert usage.cached_by_tier == {"device": 16, "shared": 32}
    assert usage_of(usage_to_proto(usage)) == usage


def test_times_survive_the_wire_as_people_read_them() -> None:
    usage = Usage(steps=128, median_step_ms=7.6, max_step_ms=41.07, queue_ms=3, first_token_ms=40)
    assert usage_of(usage_to_proto(usage)) == usage


def test_a_tier_that_a_newer_worker_names_still_counts() -> None:
    usage = Usage(cached={99: 16, types_pb2.KV_TIER_DEVICE: 16})
    assert usage.cached_tokens == sum(usage.cached_by_tier.values()) == 32
