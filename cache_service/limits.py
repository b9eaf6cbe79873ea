"""What one call may ask for, and what all of them may hold together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """`held_bytes` bounds what is being received, and again what is being sent.

    `puts` bounds what gRPC itself holds of streams that are being read: several pieces of each.
    """

    max_keys: int
    max_bundle_bytes: int
    held_bytes: int
    room_s: float
    stall_s: float
    connections: int
    puts: int
