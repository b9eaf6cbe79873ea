"""How the mesh calls itself: channels with the mesh's limits and keepalive, retries with back-off.

Only unary calls that are harmless to repeat are retried by transport (their protos say so); streams are resumed by
those who know what they carried.
"""

import json
import random
from dataclasses import dataclass

import grpc

from mesh.tls import Tls, server_name
from shoal.channel import channel_options

# google.rpc retry policy for calls that may be repeated: what was refused before it was handled.
_RETRY = {
    "methodConfig": [
        {
            "name": [{"service": "shoal.cache.v1.CacheService", "method": method} for method in ("Match", "Stats")],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def connect(address: str, tls: Tls | None = None, identity: str = "") -> grpc.aio.Channel:
    """A channel to host:port. Connects when first used and again after every loss; close it when done.

    With `tls` the peer must prove that it is `identity` (mesh.tls), whatever its address; without an identity, that
    the host of `address` is its name.
    """
    options: list[tuple[str, int | str]] = [*channel_options(), ("grpc.service_config", json.dumps(_RETRY))]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if identity:
        options.append(("grpc.ssl_target_name_override", server_name(identity)))
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


@dataclass(slots=True)
class Backoff:
    """Waits between tries: exponential with full jitter, so that a crowd does not come back in step.

    Source: M. Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015).
    """

    first_s: float = 0.05
    most_s: float = 2.0
    _tries: int = 0

    def next_s(self) -> float:
        """Seconds to wait before the next try."""
        ceiling = min(self.most_s, self.first_s * 2.0**self._tries)
        self._tries = min(self._tries + 1, 32)
        return random.uniform(self.first_s / 2, ceiling)

    def reset(self) -> None:
        """A try went well."""
        self._tries = 0
