"""What an Inference Gateway is told about one request: which gateways may have it, and with which reservation.

    who       the tenant of its key, where gateways have a key file: 401 for one that is none
    what      its body, read as the gateway will read it: 400 as the gateway would
    where     workers with room, reserved under a ticket for the gateway to redeem. Without room the request goes
              without a ticket and waits in the gateway's queue; below priority 0 it is refused: 429. No worker: 503
    gateway   the ready one with least to do, within the subset that the data plane allows: 503 without any

A request that generates nothing, belongs to a session, has several prompts, or is of a model without a tokenizer here
goes without a ticket as well. A pick is followed until its response has ended.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.clock import Clock
from tandem_services.common.errors import ApiError
from tandem_services.common.tasks import BackgroundTasks
from tandem_services.gateway.access.access_metrics import AccessMetrics
from tandem_services.gateway.access.authentication import tenant_of
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.access.key_watch import KeyWatch
from tandem_services.gateway.limits import MAX_REQUEST_ID_CHARACTERS
from tandem_services.gateway.plan import GenerationPlan
from tandem_services.router.choice import RouteQuery
from tandem_services.router_server.desk import RoutingDesk
from tandem_services.router_server.endpoints import GatewayEndpoints
from tandem_services.router_server.metrics import RouterMetrics
from tandem_services.router_server.request_reading import RequestReading

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
        """The data plane says who has answered."""
        if endpoint != self._at and endpoint in self.endpoints and not self._ended:
            self.picker.metrics.elsewhere.inc()
            self.picker.endpoints.ended(self._at)
            self.picker.endpoints.began(endpoint)
            self._at = endpoint

    def end(self) -> None:
        """The response has ended, or nobody waits for it any more. Once is enough."""
        if self._ended:
            return
        self._ended = True
        self.picker.endpoints.ended(self._at)
        if self.reservation is not None:
            self.picker.background.start(self.picker.release(self.reservation))


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointPicker:
    """One per router."""

    desk: RoutingDesk
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
        await self.desk.release(reservation)

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
        held = await self.desk.place(query, priority=read.plan.priority, interface=INTERFACE)
        return None if held is None else held.reservation


def _query(head: RequestHead, model: str, plan: GenerationPlan) -> RouteQuery | None:
    """As the gateway will ask; None for what it asks in other ways."""
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
