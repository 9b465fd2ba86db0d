"""The gateways that an Inference Gateway may be sent to: which there are, which are ready, which has least to do.

    named      by --gateway HOST:PORT; a name, such as that of a headless Service, stands for all of its addresses
    resolved   every `RESOLVE_EVERY_S`; what a name stood for last holds while it cannot be resolved
    ready      those that answered /ready with 200 when they were last asked, every second
    chosen     the one with fewest requests of this router; the data plane may have its own idea of who is eligible

Without --gateway everything that the data plane says is eligible counts as ready: it alone knows then.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import httpx

from tandem_engine.addresses import Address, AddressError, ip_of, is_wildcard
from tandem_engine.clock import Clock
from tandem_engine.errors import ConfigError
from tandem_services.common.errors import unavailable
from tandem_services.common.tasks import for_ever
from tandem_services.router_server.metrics import RouterMetrics

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 2.0
RESOLVE_EVERY_S = 5.0
MAX_ENDPOINTS = 1024
NAMED_AT_ONCE = 3
"""The one that is meant, and who comes next if it does not answer."""
NO_GATEWAY_RETRY_S = 2.0


def gateway_address(text: str) -> Address:
    """One --gateway. Raises `ConfigError`."""
    try:
        address = Address.parse(text)
    except AddressError as error:
        raise ConfigError(f"--gateway must be HOST:PORT, such as tandem-gateway:8000: {error}") from error
    if not address.port or is_wildcard(address.host):
        raise ConfigError(f"--gateway must be HOST:PORT, such as tandem-gateway:8000, got {text[:200]!r}")
    return address


def is_endpoint(text: str) -> bool:
    """Whether `text` is an `ip:port` as the endpoint-picker protocol writes it, IPv6 in brackets."""
    try:
        address = Address.parse(text)
    except AddressError:
        return False
    return address.port > 0 and ip_of(address.host) is not None


async def addresses_of(place: Address) -> set[str]:
    """All endpoints that a name stands for now, as `ip:port`. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    return {str(Address(str(address[0]), place.port)) for *_, address in found}


@dataclass(kw_only=True, slots=True)
class GatewayEndpoints:
    """All that one router knows."""

    places: tuple[Address, ...]
    clock: Clock
    random: Random
    metrics: RouterMetrics
    ready: frozenset[str] = frozenset()
    _resolved: dict[Address, set[str]] = field(default_factory=dict)
    _resolved_at: float = float("-inf")
    _running: Counter[str] = field(default_factory=Counter)

    def choose(self, subset: Iterable[str] | None) -> tuple[str, ...]:
        """The best of `subset` (None: of all), and up to two more in case it does not answer.

        Raises `ApiError` 503 when none of them is ready.
        """
        able = self.ready if subset is None else {each for each in subset if is_endpoint(each)}
        if subset is not None and self.places:
            able &= self.ready
        if not able:
            raise unavailable("No gateway is ready. Try again later.", retry_after=NO_GATEWAY_RETRY_S)
        # Ties at random: several routers would otherwise all begin with the same one.
        ranked = sorted(able, key=lambda each: (self._running[each], self.random.random()))
        return tuple(ranked[:NAMED_AT_ONCE])

    def began(self, endpoint: str) -> None:
        """A request goes to `endpoint`."""
        self._running[endpoint] += 1

    def ended(self, endpoint: str) -> None:
        self._running[endpoint] -= 1
        if self._running[endpoint] <= 0:
            del self._running[endpoint]

    def running(self, endpoint: str) -> int:
        return self._running[endpoint]

    def complaint(self) -> str | None:
        """For /ready."""
        return "none of --gateway is ready" if self.places and not self.ready else None

    async def run(self) -> None:
        """Follow the gateways, for ever."""
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, limits=httpx.Limits(max_connections=64)) as client:

            async def look() -> None:
                await self.refresh(client)

            complaint = "cannot check the gateways"
            await for_ever(look, every_s=PROBE_EVERY_S, logger=logger, complaint=complaint, at_once=True)

    async def refresh(self, client: httpx.AsyncClient) -> None:
        """Resolve, if it is time, and ask everybody whether they are ready."""
        if self.clock.now() - self._resolved_at >= RESOLVE_EVERY_S:
            await self._resolve()
        known = sorted(set().union(*self._resolved.values()))[:MAX_ENDPOINTS]
        answers = await asyncio.gather(*(_is_ready(client, endpoint) for endpoint in known))
        self.ready = frozenset(endpoint for endpoint, ready in zip(known, answers, strict=True) if ready)
        self.metrics.ready_gateways.set(len(self.ready))

    async def _resolve(self) -> None:
        self._resolved_at = self.clock.now()
        for place in self.places:
            try:
                self._resolved[place] = await addresses_of(place)
            except OSError as error:
                logger.warning("cannot resolve --gateway %s: %s", place, error)


async def _is_ready(client: httpx.AsyncClient, endpoint: str) -> bool:
    try:
        return (await client.get(Address.parse(endpoint).url("/ready"))).status_code == 200
    except httpx.HTTPError:
        return False
