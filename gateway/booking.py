"""What a request is charged: reserved before admission, settled with the real figures however it ends (design §2)."""

from collections.abc import Sequence

from gateway.expected import ExpectedOutput
from gateway.limits import Limiter, Reservation
from gateway.limits.price import OutputEstimate, price
from gateway.metrics import Metrics
from gateway.request import Request
from mesh.clients.usage import Usage
from mesh.errors import QuotaExceeded, ShoalError


class Books:
    """The tenants' buckets and what is known of their answers' lengths."""

    def __init__(self, limiter: Limiter, metrics: Metrics) -> None:
        self._limiter = limiter
        self._metrics = metrics
        self._estimate = OutputEstimate()
        self._mean = ExpectedOutput()

    async def reserve(self, request: Request) -> "Booking":
        """Charge the expected price at zero cache. Raises QuotaExceeded, or InvalidRequest if it never fits."""
        output = self._estimate.expected(request.tenant.name, request.sampling.max_tokens) * request.choices
        cost = price(request.model, len(request.prompt_ids), output)
        try:
            reservation = await self._limiter.reserve(request.tenant, cost)
        except ShoalError as error:
            self._metrics.reserved("refused" if isinstance(error, QuotaExceeded) else "impossible")
            raise
        self._metrics.reserved("granted")
        return Booking(self, request, reservation)

    def expected_tokens(self, request: Request) -> int:
        """Output tokens that placement should reckon with, per choice."""
        return self._mean.expected(request.tenant.name, request.sampling.max_tokens)

    def learn(self, request: Request, lengths: Sequence[int]) -> None:
        """These choices ended by themselves after so many tokens."""
        for tokens in lengths:
            self._estimate.observe(request.tenant.name, tokens)
            self._mean.observe(request.tenant.name, tokens)

    def count(self, request: Request, usage: Usage) -> None:
        self._metrics.used(request.model, usage)


class Booking:
    """One request's charge."""

    def __init__(self, books: Books, request: Request, reservation: Reservation) -> None:
        self._books = books
        self._request = request
        self._reservation = reservation
        self._settled = False

    async def settle(self, usage: Usage, lengths: Sequence[int] = ()) -> None:
        """Book what was used; only the first call counts. `lengths` are those of choices that ended by themselves."""
        if self._settled:
            return
        self._settled = True
        self._books.count(self._request, usage)
        self._books.learn(self._request, lengths)
        uncached = usage.prompt_tokens - usage.cached_tokens
        await self._reservation.settle(price(self._request.model, uncached, usage.completion_tokens))
