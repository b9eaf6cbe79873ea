"""What a tenant may use: a bucket of token-equivalents, charged before admission and settled after the answer."""

from gateway.limits.limiter import Limiter, Reservation

__all__ = ["Limiter", "Reservation"]
