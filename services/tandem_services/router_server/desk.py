"""Making choices, whoever asks: over HTTP, gRPC or for an Inference Gateway.

    prompt in token ids ─▶ router ─▶ room? ─▶ held, under an id with an expiry ─▶ released

A choice without room is for the front end to decide about, unless its request would rather be refused (priority below
0), or there is a gateway to wait in (`place` then has nothing to say).
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.clock import Clock
from tandem_services.common.errors import ApiError, unavailable
from tandem_services.common.tasks import BackgroundTasks
from tandem_services.router.choice import Choice, NoWorkersError, RouteQuery, WorkerView
from tandem_services.router.scoring import has_to_wait, prefill_wait_s
from tandem_services.router.tickets import new_ticket_id
from tandem_services.router_server.holds import Held, Holds, Releaser
from tandem_services.router_server.metrics import RouterMetrics
from tandem_services.router_server.schemas import ChoiceRecord, ChosenRoute

NO_ROOM_RETRY_S = 1.0


class Chooser(Releaser, Protocol):
    """What is needed of the router; see `Router`."""

    async def choose(self, query: RouteQuery) -> Choice: ...

    async def issue_ticket(self, ticket_id: str, choice: Choice, query: RouteQuery) -> bool: ...

    def workers(self) -> tuple[WorkerView, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingDesk:
    """One per router."""

    router: Chooser
    holds: Holds
    clock: Clock
    metrics: RouterMetrics
    worker_wait_s: float
    background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def choose(
        self, query: RouteQuery, *, priority: int, for_gateway: bool, interface: str, return_token_ids: bool = False
    ) -> Held:
        """A choice, held. Raises `ApiError` 503 without workers, and 429 without room for less than priority 0."""
        choice = await self._chosen(query)
        if not self.has_room(choice) and priority < 0:
            await self.router.release(choice)
            raise no_room()
        return await self._hold(query, choice, for_gateway, interface, return_token_ids)

    async def place(self, query: RouteQuery, *, priority: int, interface: str) -> Held | None:
        """As `choose`, for a gateway to carry out; None when the request had better wait for room there."""
        choice = await self._chosen(query)
        if self.has_room(choice):
            held = await self._hold(query, choice, for_gateway=True, interface=interface, return_token_ids=False)
            if held.record.choice.for_gateway:
                return held
            await self.holds.release(held.reservation)
            return None
        await self.router.release(choice)
        if priority < 0:
            raise no_room()
        return None

    async def release(self, reservation: str) -> bool:
        """False when it is not held."""
        released = await self.holds.release(reservation)
        self.metrics.held.set(len(self.holds))
        return released

    def has_room(self, choice: Choice) -> bool:
        """As a gateway's queue sees it."""
        return not has_to_wait(choice.terms) and prefill_wait_s(choice.terms) <= self.worker_wait_s

    async def _chosen(self, query: RouteQuery) -> Choice:
        try:
            return await self.router.choose(query)
        except NoWorkersError as error:
            raise unavailable(str(error), retry_after=error.retry_after) from error

    async def _hold(
        self, query: RouteQuery, choice: Choice, for_gateway: bool, interface: str, return_token_ids: bool
    ) -> Held:
        reservation = new_ticket_id()
        try:
            issued = for_gateway and await self.router.issue_ticket(reservation, choice, query)
        except asyncio.CancelledError:
            # Who asked has left: nobody would ever release it.
            self.background.start(self.router.release(choice))
            raise
        route = ChosenRoute(
            reservation=reservation,
            expires_in_s=self.holds.ttl_s,
            placement=choice.placement.value,
            source=choice.source.value,
            decode=choice.decode,
            prefill=choice.prefill,
            fetch=choice.fetch,
            prompt_tokens=len(query.token_ids),
            matched_tokens=choice.matched_tokens,
            predicted_s=sum(term.seconds for term in choice.terms),
            terms=choice.terms,
            has_room=self.has_room(choice),
            for_gateway=issued,
            token_ids=query.token_ids if return_token_ids else None,
        )
        record = ChoiceRecord(request_id=query.request_id, model=query.model, interface=interface, choice=route)
        held = Held(choice=choice, record=record, since=self.clock.now())
        for dropped in self.holds.hold(held):
            self.background.start(self.holds.give_back(dropped, "expired"))
        self.metrics.held.set(len(self.holds))
        self.metrics.chose(interface, route.source, route.placement)
        return held


def no_room() -> ApiError:
    """429: what is not important enough to wait."""
    return ApiError(
        429,
        "All workers are at their limit, and a request of priority below 0 does not wait. Try again later.",
        kind="RateLimitError",
        reason="no_room",
        retry_after=NO_ROOM_RETRY_S,
    )
