"""KV of blocks outside a worker's pool, as plain values: what is looked for, what travels, and how it is told intact.

A *bundle* is the unit of every transfer: all layers of one block in one payload, whose size its geometry fixes. It
names its own key, namespace, geometry and checksum, so a reader can refuse bytes it would misread. Where a bundle is
kept, and what a miss means, is not decided here.
"""

from dataclasses import dataclass, fields

import xxhash

from mesh.blocks import KEY_BYTES
from mesh.errors import InvalidRequest

Payload = bytes | bytearray | memoryview

# Bytes of one K or V element. A format that needs more than its elements (scales) takes a name of its own.
# So does one in another order: "tiled" is that of the CPU kernels (gpu_worker/kernels/cpu/kv.h).
ITEM_BYTES = {
    **{"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1},
    **{"fp32_tiled": 4, "bf16_tiled": 2, "int8_tiled": 1},
}
# Bytes that each token and head has besides, for K and for V: a scale.
SCALE_BYTES = {"int8_tiled": 4}
# Far above any model, and low enough that no product of them is absurd.
MOST_OF_EACH = 65_535


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What a payload's bytes mean. Raises InvalidRequest that names the field which no KV can have."""

    dtype: str
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise InvalidRequest(f"kv_dtype: {self.dtype[:32]!r} is none of {known}", field="kv_dtype", code="geometry")
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if not 0 < value <= MOST_OF_EACH:
                raise InvalidRequest(
                    f"{each.name}: {value} is not 1 to {MOST_OF_EACH}", field=each.name, code="geometry"
                )

    @property
    def bundle_bytes(self) -> int:
        """Bytes of one block's payload: K and V of all its layers, [L, 2, block_tokens, kv_heads, head_dim] items."""
        heads = self.layers * 2 * self.block_tokens * self.kv_heads
        return heads * (self.head_dim * ITEM_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0))


def check_key(name: str, key: bytes) -> None:
    """Raise InvalidRequest unless `key` is a chain key or a namespace; `name` is the field."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"{name}: {len(key)} bytes instead of {KEY_BYTES}", field=name, code="key")


@dataclass(frozen=True, slots=True)
class KeySet:
    """Blocks of one chain, in order, as one worker would read them."""

    namespace: bytes
    keys: tuple[bytes, ...]
    geometry: KvGeometry

    def __post_init__(self) -> None:
        check_key("namespace", self.namespace)
        for key in self.keys:
            check_key("keys", key)

    def first(self, count: int) -> "KeySet":
        """The leading `count` of them."""
        return KeySet(self.namespace, self.keys[:count], self.geometry)


@dataclass(frozen=True, slots=True)
class Bundle:
    """One block's KV. `checksum` is xxh3-64 of the payload; `Bundle.of` computes it."""

    key: bytes
    namespace: bytes
    geometry: KvGeometry
    payload: Payload
    checksum: int

    @classmethod
    def of(cls, key: bytes, namespace: bytes, geometry: KvGeometry, payload: Payload) -> "Bundle":
        """A bundle of `payload`, which must not change any more. Raises InvalidRequest if it does not fit."""
        check_key("key", key)
        check_key("namespace", namespace)
        size = memoryview(payload).nbytes
        if size != geometry.bundle_bytes:
            message = f"payload: {size} bytes where the geometry gives {geometry.bundle_bytes}"
            raise InvalidRequest(message, field="payload", code="geometry")
        return cls(key, namespace, geometry, payload, checksum_of(payload))

    def intact(self) -> bool:
        """Whether the payload is as long as its geometry says and has its checksum."""
        size = memoryview(self.payload).nbytes
        return size == self.geometry.bundle_bytes and checksum_of(self.payload) == self.checksum


def checksum_of(payload: Payload) -> int:
    """xxh3-64: about 10 µs a MiB. Finds damage, proves nothing against forgery: namespaces keep tenants apart."""
    return xxhash.xxh3_64_intdigest(payload)
