"""Choices that one process makes and another carries out, by way of a ticket in Redis; see `tickets`.

Without Redis there are none: nothing is issued, and nothing is found.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.choice import Choice, RouteQuery
from tandem_services.router.held_choices import HeldChoices
from tandem_services.router.membership import Membership
from tandem_services.router.tickets import Ticket, TicketBoard


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketedChoices:
    """One per router. `refresh` brings a new view of the fleet, if Redis answers."""

    board: TicketBoard
    membership: Membership
    held: HeldChoices
    refresh: Callable[[], Awaitable[None]]

    async def issue(self, ticket_id: str, choice: Choice, query: RouteQuery) -> bool:
        """Whether who learns `ticket_id` may carry out `choice`: not without a shared reservation."""
        if choice.reservation.bucket is None:
            return False
        try:
            await self.board.issue(ticket_id, Ticket.of(choice, query))
        except RedisUnavailableError:
            return False
        return True

    async def redeem(self, ticket_id: str, query: RouteQuery) -> Choice | None:
        """The choice of a ticket, which nobody holds here yet; None when it is void."""
        try:
            ticket = await self.board.take(ticket_id)
        except RedisUnavailableError:
            return None
        if ticket is None:
            return None
        if self.membership.unknown({ticket.decode, *([ticket.prefill] if ticket.prefill else [])}):
            await self.refresh()
        choice = ticket.choice_for(query, self.membership.find_usable, self.held.next_serial())
        if choice is None:
            await self.held.give_back(query.request_id, ticket.reservation)
        return choice

    async def was_redeemed(self, ticket_id: str, choice: Choice) -> bool:
        """Whether somebody else gives back what `choice` has reserved. Its ticket is void from now on."""
        try:
            return self.held.reserves(choice) and await self.board.take(ticket_id) is None
        except RedisUnavailableError:
            return True  # Nobody can tell. The reservation expires by itself.
