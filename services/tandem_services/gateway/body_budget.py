"""Bytes of request bodies that a gateway holds at once, for all clients and for each.

    1. announced  a body whose Content-Length does not fit now is refused before a byte of it is read
    2. charged    each piece is charged as it arrives; the piece that does not fit ends the request, and is not kept
    3. released   when the request has been read (parsed and turned into token ids), or has ended

A body that would not fit if it were the only one is a 413, any other a 429. What is announced and not sent is not
charged: a client that announces much and sends nothing takes nothing from others.

A client is a tenant where there are keys, else an address.
"""

from dataclasses import dataclass, field

from tandem_services.common.errors import ApiError
from tandem_services.gateway.limits import BODIES_BYTES, BODIES_BYTES_PER_CLIENT, MAX_BODY_BYTES

BODIES_RETRY_S = 1.0


@dataclass(kw_only=True, slots=True)
class BodyBudget:
    """One per gateway; belongs to its event loop."""

    most: int = BODIES_BYTES
    most_per_client: int = BODIES_BYTES_PER_CLIENT
    held: int = 0
    """Bytes now, of all clients."""
    _by_client: dict[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Bytes of the longest body that is ever taken."""
        return min(MAX_BODY_BYTES, self.most, self.most_per_client)

    def held_by(self, client: str) -> int:
        return self._by_client.get(client, 0)

    def check(self, client: str, size: int) -> None:
        """Raises `ApiError` 429 when `size` more bytes of `client` do not fit now."""
        if self.held_by(client) + size > self.most_per_client:
            raise _too_many("Your requests have too many bytes of bodies in flight. Try again later.")
        if self.held + size > self.most:
            raise _too_many("The gateway holds as many bytes of request bodies as it may. Try again later.")

    def change(self, client: str, size: int) -> None:
        """Charge, or give back where `size` is below 0."""
        self.held += size
        left = self.held_by(client) + size
        if left:
            self._by_client[client] = left
        else:
            self._by_client.pop(client, None)


@dataclass(kw_only=True, slots=True)
class BodyCharge:
    """The bytes of one request's body."""

    budget: BodyBudget
    _client: str = ""
    _bytes: int = 0

    def announce(self, client: str, size: int) -> None:
        """`client` is to send `size` bytes, 0 where it does not say. Raises `ApiError` 413 or 429."""
        self._client = client
        self._check_length(size)
        self.budget.check(client, size)

    def add(self, size: int) -> None:
        """So many more bytes are here. Raises `ApiError` 413 or 429, and charges nothing then."""
        self._check_length(self._bytes + size)
        self.budget.check(self._client, size)
        self.budget.change(self._client, size)
        self._bytes += size

    def release(self) -> None:
        """The body is not needed any more. Idempotent."""
        self.budget.change(self._client, -self._bytes)
        self._bytes = 0

    def _check_length(self, size: int) -> None:
        longest = self.budget.longest
        if size > longest:
            raise ApiError(413, f"request body is larger than {longest} bytes", kind="RequestEntityTooLargeError")


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, kind="RateLimitError", reason="bodies_in_flight", retry_after=BODIES_RETRY_S)
