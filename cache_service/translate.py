"""Bundles as Redis keeps them, and requests as plain values.

An entry is the header's length (4 bytes, little-endian), the header, the payload. It names its own key, so bytes that
reach the wrong reader, by whatever fault, read as a mismatch and never as KV.
"""

import struct

from google.protobuf.message import DecodeError

from cache_service.limits import Limits
from mesh.blocks import KEY_BYTES
from mesh.errors import InvalidRequest, PayloadTooLarge
from mesh.kv import Bundle, KeySet
from mesh.kv_wire import check_header, check_wanted, checked, geometry_of, header_of
from shoal.cache.v1 import cache_pb2

_LENGTH = struct.Struct("<I")


class Damaged(Exception):
    """An entry is not what its key says. The message says how."""


def entry_of(bundle: Bundle) -> bytes:
    """What is written to Redis."""
    header = header_of(bundle).SerializeToString()
    return b"".join((_LENGTH.pack(len(header)), header, bundle.payload))


def bundle_of(entry: bytes, keys: KeySet, index: int) -> Bundle:
    """The bundle in `entry`, which must be the one of key number `index`. Raises Damaged if it is not, or not whole."""
    try:
        (length,) = _LENGTH.unpack_from(entry)
        start = _LENGTH.size + length
        header = cache_pb2.BundleHeader.FromString(entry[_LENGTH.size : start])
        geometry = check_header(header, keys.geometry.bundle_bytes)
        check_wanted(header, geometry, keys, index)
        payload = memoryview(entry)[start:]
        return checked(Bundle(header.key, header.namespace, geometry, payload, header.checksum))
    except (struct.error, DecodeError, InvalidRequest) as error:
        raise Damaged(str(error)) from None


def keys_of(request: cache_pb2.MatchRequest | cache_pb2.GetRequest, limits: Limits) -> KeySet:
    """The blocks that a request asks for. Raises InvalidRequest or PayloadTooLarge, naming the field."""
    message, joined = request.keys, request.keys.keys  # each reading of the field copies it
    count, rest = divmod(len(joined), KEY_BYTES)
    if rest:
        raise InvalidRequest(f"keys.keys: {len(joined)} bytes are no keys of {KEY_BYTES}", field="keys.keys")
    if count > limits.max_keys:
        raise PayloadTooLarge(f"keys.keys: {count} are more than {limits.max_keys}", field="keys.keys")
    keys = tuple(joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES))
    try:
        found = KeySet(message.namespace, keys, geometry_of(message))
    except InvalidRequest as wrong:
        raise InvalidRequest(f"keys.{wrong.message}", field=f"keys.{wrong.field}", code=wrong.code) from None
    if found.geometry.bundle_bytes > limits.max_bundle_bytes:
        size = found.geometry.bundle_bytes
        raise PayloadTooLarge(f"keys: bundles of {size} bytes are over {limits.max_bundle_bytes}", field="keys")
    return found
