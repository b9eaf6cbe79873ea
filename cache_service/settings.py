"""The cache service's settings."""

from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator
from redis.asyncio.connection import parse_url

from cache_service.limits import Limits
from mesh.settings import ServiceSettings

MIB = 1024 * 1024


class CacheSettings(ServiceSettings):
    """Variables are SHOAL_CACHE_<FIELD>."""

    service: ClassVar[str] = "CACHE"

    port: int = Field(50081, ge=0, le=65535, description="gRPC port. 0 = any free port.")
    redis_url: str = Field(
        "redis://127.0.0.1:6390/0",
        description="Redis that holds the bundles; let it evict by LFU at its cap (allkeys-lfu, volatile-lfu).",
    )
    redis_timeout_s: float = Field(
        0.25,
        gt=0,
        le=60,
        description="Seconds in which Redis must answer, and 10 ms more for each MiB that it carries.",
    )
    connections: int = Field(16, ge=1, le=1024, description="Most connections to Redis; further calls wait for one.")
    ttl_s: float = Field(3600, ge=1, description="Seconds that a bundle is kept after it was last stored or read.")
    max_keys: int = Field(65_536, ge=1, description="Most blocks in one Match or Get.")
    max_bundle_bytes: int = Field(64 * MIB, ge=1, description="Largest bundle taken: one block's KV of all layers.")
    held_bytes: int = Field(
        256 * MIB,
        ge=1,
        validate_default=True,
        description="Most bytes of bundles in memory that are being received; as many that are sent.",
    )
    puts: int = Field(64, ge=1, description="Most calls of Put at once: gRPC holds a piece or two of each.")
    room_s: float = Field(2, gt=0, description="Seconds that a call waits for room among these, before it is refused.")
    stall_s: float = Field(
        10, gt=0, description="Seconds in which a sender must bring a whole bundle, and a reader take a piece."
    )

    @field_validator("redis_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        parse_url(url)
        return url

    @field_validator("held_bytes")
    @classmethod
    def _one_bundle_fits(cls, held_bytes: int, info: ValidationInfo) -> int:
        largest = info.data.get("max_bundle_bytes", 0)
        if held_bytes < largest:
            raise ValueError(f"less than one bundle may have, {cls.variable('max_bundle_bytes')} = {largest}")
        return held_bytes

    def limits(self) -> Limits:
        """What one call, and all of them, may take."""
        return Limits(
            max_keys=self.max_keys,
            max_bundle_bytes=self.max_bundle_bytes,
            held_bytes=self.held_bytes,
            room_s=self.room_s,
            stall_s=self.stall_s,
            connections=self.connections,
            puts=self.puts,
        )
