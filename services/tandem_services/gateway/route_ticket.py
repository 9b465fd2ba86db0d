"""The ticket that came with a request: workers that a stand-alone router has chosen for it, and reserved.

It is for the first attempt at the request's one prompt. Whoever asks first gets its id; what is no id, expired, or was
issued for another prompt changes nothing: the gateway then chooses by itself (`Router.redeem`).
"""

from tandem_services.router.tickets import is_ticket_id

TICKET_HEADER = "x-tandem-reservation"


class RouteTicket:
    """One request's, from its head to its first attempt."""

    __slots__ = ("_id",)

    def __init__(self, header: str | None = None) -> None:
        self._id = header if header is not None and is_ticket_id(header) else None

    def take(self) -> str | None:
        """The id, once."""
        ticket_id, self._id = self._id, None
        return ticket_id
