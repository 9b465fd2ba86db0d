"""Picks a gateway for each request of an Inference Gateway, and tracks the gateways that it may pick.

`EndpointPicker` handles one request:

    tenant    of its key, where gateways have a key file: 401 for an invalid key
    body      read as the gateway will read it: 400 as from the gateway
    workers   with capacity, reserved under a ticket that the gateway redeems. Without capacity the request gets no
              ticket and waits in the gateway's queue; below priority 0 it is rejected: 429. Without any worker: 503
    gateway   the ready one with the least requests, in the subset that the data plane allows: 503 without any

A request also gets no ticket if it generates nothing, belongs to a session, has several prompts, or is for a model
without a tokenizer here. A pick is tracked until its response has ended.

`GatewayEndpoints` tracks the gateways:

    named      by --gateway HOST:PORT; a name, such as that of a headless Service, stands for all of its addresses
    resolved   every `RESOLVE_EVERY_S`; the last addresses remain valid while a name cannot be resolved
    ready      those whose last /ready probe, one per second, returned 200
    chosen     the one with the fewest requests of this router, among those that the data plane allows

Without --gateway all endpoints that the data plane offers count as ready.
"""

import asyncio
import logging
import socket
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import httpx

from tandem_engine.base.addresses import Address, AddressError, ip_of, is_wildcard
from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import ConfigError
from tandem_services.common.errors import ApiError, unavailable
from tandem_services.common.tasks import BackgroundTasks, run_periodically
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.access.keys import KeyWatch
from tandem_services.gateway.access.tenants import AccessMetrics
from tandem_services.gateway.dispatch.plan import GenerationPlan
from tandem_services.gateway.http.authentication import tenant_of
from tandem_services.gateway.limits import MAX_REQUEST_ID_CHARACTERS
from tandem_services.router.decision import RouteQuery
from tandem_services.router_server.request_reading import RequestReading
from tandem_services.router_server.routing_service import RouterMetrics, RoutingService

logger = logging.getLogger(__name__)
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 2.0
RESOLVE_EVERY_S = 5.0
MAX_ENDPOINTS = 1024

NAMED_AT_ONCE = 3
"""The chosen one, and the next ones if it does not answer."""

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
    """The gateways that one router tracks."""

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

    def failure(self) -> str | None:
        """For /ready."""
        return "none of --gateway is ready" if self.places and not self.ready else None

    async def run(self) -> None:
        """Follow the gateways until canceled."""
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, limits=httpx.Limits(max_connections=64)) as client:

            async def look() -> None:
                await self.refresh(client)

            failure = "cannot check the gateways"
            await run_periodically(look, every_s=PROBE_EVERY_S, logger=logger, failure=failure, at_once=True)

    async def refresh(self, client: httpx.AsyncClient) -> None:
        """Resolve names, if it is time, and probe all gateways."""
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


INTERFACE = "ext_proc"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestHead:
    """What is known of a request before its body."""

    headers: Sequence[tuple[bytes, bytes]]
    """Lower-case names and values, pseudo-headers included."""
    subset: tuple[str, ...] | None = None
    """Endpoints to choose from; None: any."""

    def first(self, wanted: str) -> str:
        """ "" when it has none."""
        name = wanted.encode("ascii")
        return next((value.decode("latin-1") for each, value in self.headers if each == name), "")

    @property
    def path(self) -> str:
        """Without its query."""
        return self.first(":path").partition("?")[0]


@dataclass(kw_only=True, slots=True, eq=False)
class Pick:
    """One request's way, until `end`."""

    endpoints: tuple[str, ...]
    reservation: str | None
    picker: "EndpointPicker"
    _at: str = field(init=False)
    _ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._at = self.endpoints[0]
        self.picker.endpoints.began(self._at)

    def served_by(self, endpoint: str) -> None:
        """The data plane reports which gateway has answered."""
        if endpoint != self._at and endpoint in self.endpoints and not self._ended:
            self.picker.metrics.elsewhere.inc()
            self.picker.endpoints.ended(self._at)
            self.picker.endpoints.began(endpoint)
            self._at = endpoint

    def end(self) -> None:
        """The response has ended, or no client waits for it any more. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self.picker.endpoints.ended(self._at)
        if self.reservation is not None:
            self.picker.background.start(self.picker.release(self.reservation))


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointPicker:
    """Endpoint picker of an Inference Gateway: chooses workers and returns gateway endpoints."""

    routing: RoutingService
    reading: RequestReading
    endpoints: GatewayEndpoints
    metrics: RouterMetrics
    clock: Clock
    keys: KeyWatch | None = None
    access_metrics: AccessMetrics | None = None
    cache_secret: bytes = b""
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def pick(self, head: RequestHead, body: bytes | None) -> Pick:
        """`body` None: it is not to be had, or there is none. Raises `ApiError`."""
        began = self.clock.now()
        try:
            caller = self._caller(head)
            endpoints = self.endpoints.choose(head.subset)
            reservation = None if body is None else await self._placed(head, body, caller)
        except ApiError as error:
            self.metrics.refused(INTERFACE, error.status)
            raise
        if reservation is None:
            self.metrics.unplaced.inc()
        else:
            self.metrics.choice_seconds.observe(self.clock.now() - began)
        return Pick(endpoints=endpoints, reservation=reservation, picker=self)

    async def release(self, reservation: str) -> None:
        await self.routing.release(reservation)

    def _caller(self, head: RequestHead) -> Caller:
        if self.keys is None or self.access_metrics is None:
            return Caller()
        tenant = tenant_of(head.headers, self.keys, self.access_metrics)
        return Caller(tenant=tenant, cache_secret=self.cache_secret)

    async def _placed(self, head: RequestHead, body: bytes, caller: Caller) -> str | None:
        read = await self.reading.request(head.path, body, caller)
        query = None if read is None else _query(head, *read)
        if read is None or query is None:
            return None
        held = await self.routing.place(query, priority=read.plan.priority, interface=INTERFACE)
        return None if held is None else held.reservation


def _query(head: RequestHead, model: str, plan: GenerationPlan) -> RouteQuery | None:
    """The query as the gateway will make it; None for requests that it routes in other ways."""
    if len(plan.choices) != plan.n or plan.turn is not None:
        return None
    first = plan.choices[0]
    return RouteQuery(
        request_id=head.first("x-request-id")[:MAX_REQUEST_ID_CHARACTERS] or uuid.uuid4().hex,
        model=model,
        token_ids=first.input_ids,
        cache_salt=plan.cache_salt,
        max_tokens=first.sampling.max_tokens * plan.n,
        session_key=plan.session_key,
    )
