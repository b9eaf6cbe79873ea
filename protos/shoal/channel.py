"""How a channel to a Shoal service is set: the one place where client and server agree on keepalive and sizes.

A server closes a connection that pings more often than it allows, so both ends read the same constants from here.
"""

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
