"""How a channel to a Shoal service is set: the one place where client and server agree on keepalive and sizes.

A server closes a connection that pings more often than it allows, so both ends read the same constants from here.
"""

from dataclasses import dataclass
from pathlib import Path

import grpc

# A client pings an idle or silent peer this often, and gives it up when no answer comes in time: a peer that vanished
# without closing (power, network) is noticed within their sum, about 15 s.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

# How soon a lost connection is tried again: gRPC's own 1 s to 120 s would keep a peer that is back waiting for minutes.
FIRST_RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 2_000

# Largest message either way. Larger things (KV, weights) travel as streams of parts.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

ChannelOptions = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """How a client knows the mesh, and is known: paths of PEM files.

    `ca` signs the gateway's certificate (None: the authorities that gRPC brings). `certificate` and `key` go together
    and are only needed where the gateway asks for them. `server_name` is the name to expect in the gateway's
    certificate where that is not the address's own host.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError that names the file, and ValueError for a certificate without its key."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: name both files or none")
        return grpc.ssl_channel_credentials(*map(_read, (self.ca, self.key, self.certificate)))

    def options(self) -> tuple[tuple[str, str], ...]:
        """Channel options that go with the credentials."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def trust(tls: "ClientTls | Path | str | None") -> ClientTls | None:
    """A path alone is the CA's."""
    return tls if tls is None or isinstance(tls, ClientTls) else ClientTls(ca=tls)


def channel_options() -> ChannelOptions:
    """Options of a client's channel. Pings go on without calls, so a dead peer is known before the next request."""
    return (
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", LONGEST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", LONGEST_RECONNECT_MS),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    )


def server_options() -> ChannelOptions:
    """Options of a server: allows the pings above, pings back alike, and never shares its port with another process."""
    return (
        *channel_options(),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    )
