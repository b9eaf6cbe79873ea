"""The shared tier's part of a worker's settings."""

from pydantic import ByteSize, Field, field_validator

from gpu_worker.cold.policy import ColdLimits
from gpu_worker.cold.tier import ColdSettings
from mesh.settings import ModelSettings, split_targets

_LIMITS = ColdLimits()


class ColdFields(ModelSettings):
    """Fields that WorkerSettings inherits."""

    caches: str = Field(
        "",
        description="host:port of the cache services, comma-separated: KV that all workers share. Empty = none.",
    )
    cold_match_ms: int = Field(
        round(_LIMITS.match_s * 1000),
        ge=1,
        description="Milliseconds that a cache service may take to say what it holds, or it is left alone for a time.",
    )
    cold_stall_ms: int = Field(
        round(_LIMITS.stall_s * 1000), ge=1, description="Milliseconds of silence that end a fetch; what came is used."
    )
    cold_share: float = Field(
        _LIMITS.share,
        gt=0,
        description="Share of the time that computing a prompt's missing KV would take which fetching it may take.",
    )
    cold_least_blocks: int = Field(
        _LIMITS.least_blocks, ge=1, description="Missing blocks (16 tokens each) that are worth asking for."
    )
    cold_bytes_in_flight: ByteSize = Field(
        ByteSize(64 << 20), gt=0, description="Most KV between the cache services and the engine, over all requests."
    )
    cold_store_after: int = Field(
        2,
        ge=1,
        description="Times that this worker computes or finds a block before it stores it for others. 1 = at once.",
    )
    cold_queue_blocks: int = Field(
        4096, ge=0, description="Blocks that may wait to be stored; more are dropped, to be computed again elsewhere."
    )

    @field_validator("caches")
    @classmethod
    def _are_caches(cls, caches: str) -> str:
        split_targets(caches)
        return caches

    def cold(self) -> ColdSettings:
        """What the shared tier's part of the worker is told."""
        limits = ColdLimits(
            least_blocks=self.cold_least_blocks,
            match_s=self.cold_match_ms / 1000,
            stall_s=self.cold_stall_ms / 1000,
            share=self.cold_share,
        )
        return ColdSettings(
            caches=self.caches,
            limits=limits,
            bytes_in_flight=self.cold_bytes_in_flight,
            store_after=self.cold_store_after,
            queue_blocks=self.cold_queue_blocks,
        )
