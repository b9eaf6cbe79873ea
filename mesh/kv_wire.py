"""Bundles as messages of cache.proto and back, with every check that a reader owes the bytes it is handed.

Both ends use it: what the service refuses of a Put is what a worker refuses of a Get. A refusal is an InvalidRequest
(PayloadTooLarge over a limit) that names the field; its code is the reason that metrics count:

    key         a key or namespace is not 16 bytes
    geometry    an unknown dtype, a number that no KV has, a payload that is not what the geometry gives
    version     another format version
    foreign     another key, namespace or geometry than the one asked for
    order       a piece without a header, or not where the last one ended
    empty       a piece without payload
    truncated   the bundle ends before its payload is whole
    checksum    the payload is not what was sent
    too_large   a piece or a bundle over its limit
"""

from collections.abc import Iterator

from mesh.blocks import FORMAT_VERSION
from mesh.errors import InvalidRequest, PayloadTooLarge
from mesh.kv import Bundle, KeySet, KvGeometry, check_key
from shoal.cache.v1 import cache_pb2

PIECE_BYTES = 1024 * 1024


def key_set_message(keys: KeySet) -> cache_pb2.KeySet:
    """`keys` as it travels."""
    geometry = keys.geometry
    return cache_pb2.KeySet(
        namespace=keys.namespace,
        keys=b"".join(keys.keys),
        kv_dtype=geometry.dtype,
        block_tokens=geometry.block_tokens,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
    )


def header_of(bundle: Bundle) -> cache_pb2.BundleHeader:
    """What goes before `bundle`'s payload, on the wire and in store."""
    geometry = bundle.geometry
    return cache_pb2.BundleHeader(
        key=bundle.key,
        namespace=bundle.namespace,
        kv_dtype=geometry.dtype,
        block_tokens=geometry.block_tokens,
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        format_version=FORMAT_VERSION,
        payload_bytes=geometry.bundle_bytes,
        checksum=bundle.checksum,
    )


def geometry_of(message: cache_pb2.BundleHeader | cache_pb2.KeySet) -> KvGeometry:
    """The geometry that a header or a key set names. Raises InvalidRequest."""
    return KvGeometry(message.kv_dtype, message.block_tokens, message.layers, message.kv_heads, message.head_dim)


def pieces_of(bundle: Bundle) -> Iterator[cache_pb2.Chunk]:
    """`bundle` in pieces of at most PIECE_BYTES, each made when it is asked for; the first carries the header."""
    size = bundle.geometry.bundle_bytes
    if size <= PIECE_BYTES and isinstance(bundle.payload, bytes):  # as it is: no copy
        yield cache_pb2.Chunk(header=header_of(bundle), payload=bundle.payload)
        return
    view = memoryview(bundle.payload).cast("B")
    for offset in range(0, size, PIECE_BYTES):
        header = header_of(bundle) if offset == 0 else None
        yield cache_pb2.Chunk(header=header, offset=offset, payload=bytes(view[offset : offset + PIECE_BYTES]))


class Assembly:
    """Puts one bundle together out of its pieces. Holds its payload until `bundle` hands it over."""

    def __init__(self, first: cache_pb2.Chunk, most_bytes: int) -> None:
        """`first` must carry the header. Raises InvalidRequest, PayloadTooLarge."""
        if not first.HasField("header"):
            raise _refusal("header", "a bundle's first piece carries its header", "order")
        self.header = first.header
        self.geometry = check_header(first.header, most_bytes)
        self._size = self.geometry.bundle_bytes
        self._parts: list[bytes] = []
        self._received = 0
        self._take(first)

    @property
    def whole(self) -> bool:
        """Whether all of the payload is here."""
        return self._received == self._size

    def add(self, piece: cache_pb2.Chunk) -> None:
        """The next piece. Raises InvalidRequest for one that is not next."""
        if piece.HasField("header"):
            raise self.cut("the next bundle's header comes")
        self._take(piece)

    def cut(self, what: str) -> InvalidRequest:
        """The error for an end that comes too early."""
        return _refusal("payload", f"{what} after {self._received} of {self._size} bytes", "truncated")

    def bundle(self) -> Bundle:
        """The whole bundle. Raises InvalidRequest if it is not what was sent."""
        payload = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        header = self.header
        return checked(Bundle(header.key, header.namespace, self.geometry, payload, header.checksum))

    def _take(self, piece: cache_pb2.Chunk) -> None:
        payload, size = piece.payload, len(piece.payload)
        if not size:
            raise _refusal("payload", "a piece without payload", "empty")
        if size > PIECE_BYTES:
            raise PayloadTooLarge(f"payload: a piece of {size} bytes is over {PIECE_BYTES}", field="payload")
        if piece.offset != self._received:
            raise _refusal("offset", f"{piece.offset} where the last piece ended at {self._received}", "order")
        if self._received + size > self._size:
            raise _refusal("payload", f"{self._received + size} bytes are more than the header's {self._size}", "order")
        self._parts.append(payload)
        self._received += size


def check_header(header: cache_pb2.BundleHeader, most_bytes: int) -> KvGeometry:
    """The header's geometry. Raises InvalidRequest for one that cannot be true, PayloadTooLarge over `most_bytes`."""
    check_key("header.key", header.key)
    check_key("header.namespace", header.namespace)
    if header.format_version != FORMAT_VERSION:
        raise _refusal("header.format_version", f"{header.format_version} instead of {FORMAT_VERSION}", "version")
    try:
        geometry = geometry_of(header)
    except InvalidRequest as wrong:
        raise InvalidRequest(f"header.{wrong.message}", field=f"header.{wrong.field}", code=wrong.code) from None
    if geometry.bundle_bytes > most_bytes:
        message = f"header: a bundle of {geometry.bundle_bytes} bytes is over {most_bytes}"
        raise PayloadTooLarge(message, field="header.payload_bytes")
    if header.payload_bytes != geometry.bundle_bytes:
        told = f"{header.payload_bytes} where the geometry gives {geometry.bundle_bytes}"
        raise _refusal("header.payload_bytes", told, "geometry")
    return geometry


def checked(bundle: Bundle) -> Bundle:
    """`bundle`, if it is intact. Raises InvalidRequest."""
    if not bundle.intact():
        raise _refusal("header.checksum", "the payload has another", "checksum")
    return bundle


def check_wanted(header: cache_pb2.BundleHeader, geometry: KvGeometry, keys: KeySet, index: int) -> None:
    """Raise InvalidRequest unless the header belongs to key number `index` of `keys`."""
    wanted = ((header.key, keys.keys[index], "key"), (header.namespace, keys.namespace, "namespace"))
    for found, asked, name in wanted:
        if found != asked:
            raise _refusal(f"header.{name}", f"{found.hex()} where {asked.hex()} was asked for", "foreign")
    if geometry != keys.geometry:
        raise _refusal("header", f"{geometry} where {keys.geometry} was asked for", "foreign")


def _refusal(field: str, message: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", field=field, code=reason)
