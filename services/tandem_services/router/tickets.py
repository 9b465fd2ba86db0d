"""Tickets: choices that a stand-alone router makes and a gateway redeems.

    issued    Redis stores the choice under an unpredictable id for as long as its reservation counts
    redeemed  once, by the gateway that got the id with a request, if the prompt is the one of the choice; from then on
              the gateway releases the reservation
    void      expired, or for another prompt: the gateway makes a choice as if there were no ticket

A ticket names incarnations, never addresses: the gateway resolves them in its own view of the fleet.

`RouteTicket` is the ticket of one request. It applies to the first attempt of the request's only prompt, and its id is
returned once. An invalid, expired or foreign ticket has no effect: the gateway then chooses itself (`Router.redeem`).
"""

import re
import secrets
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import msgspec

from tandem_services.common.redis_client import RedisClient, decoded
from tandem_services.router.decision import (
    Claim,
    Placement,
    PlannedFetch,
    Reservation,
    RouteDecision,
    RouteQuery,
    ScoreTerm,
    Source,
    WorkerView,
)
from tandem_services.router.keys import RESERVATION_MS, Keys

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**32)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_ID = re.compile(r"[0-9a-f]{32}")


def new_ticket_id() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def is_ticket_id(text: str) -> bool:
    """Whether `text` may be the id of a ticket: an invalid one is not looked up in Redis."""
    return _ID.fullmatch(text) is not None


class TicketFetch(msgspec.Struct, frozen=True, array_like=True):
    """See `PlannedFetch`."""

    source: str
    tokens: _Count
    seconds: _Seconds
    within_s: _Seconds


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A choice as it lies in Redis. See `RouteDecision`."""

    prompt: bytes
    """Digest of model, adapter, cache salt and tokens."""
    decode: str
    prefill: str | None
    placement: Placement
    terms: tuple[tuple[str, _Seconds], ...]
    matched_tokens: _Count
    fetch: TicketFetch | None
    bucket: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None
    claims: tuple[tuple[str, _Count, _Count, _Count], ...]
    note: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0

    @classmethod
    def of(cls, decision: RouteDecision, query: RouteQuery) -> "Ticket":
        fetch = decision.fetch
        return cls(
            prompt=_prompt_digest(query),
            decode=decision.decode.incarnation,
            prefill=None if decision.prefill is None else decision.prefill.incarnation,
            placement=decision.placement,
            terms=tuple((term.name, term.seconds) for term in decision.terms),
            matched_tokens=decision.matched_tokens,
            fetch=None
            if fetch is None
            else TicketFetch(fetch.source.incarnation, fetch.tokens, fetch.seconds, fetch.within_s),
            bucket=decision.reservation.bucket,
            claims=tuple(
                (c.incarnation, c.queue_tokens, c.sequences, c.room_tokens) for c in decision.reservation.claims
            ),
            note=decision.reservation.note,
        )

    @property
    def reservation(self) -> Reservation:
        """To give back what was reserved for a ticket that is void."""
        return Reservation(self.bucket, tuple(Claim(*claim) for claim in self.claims), note=self.note)

    def choice_for(
        self, query: RouteQuery, find: Callable[[str], WorkerView | None], serial: int
    ) -> RouteDecision | None:
        """The choice, if it is for this prompt and `find` returns its workers, none of which the query excludes."""
        decode = find(self.decode)
        prefill = None if self.prefill is None else find(self.prefill)
        excluded = {self.decode, self.prefill} & query.exclude
        if decode is None or (self.prefill is not None and prefill is None) or excluded:
            return None
        if self.prompt != _prompt_digest(query) or query.compat_hash not in (None, decode.compat_hash):
            return None
        return RouteDecision(
            request_id=query.request_id,
            decode=decode,
            prefill=prefill,
            source=Source.ROUTER,
            placement=self.placement,
            terms=tuple(ScoreTerm(name, seconds) for name, seconds in self.terms),
            matched_tokens=self.matched_tokens,
            fetch=self._fetch(find),
            reservation=Reservation(self.bucket, self.reservation.claims, serial, self.note),
        )

    def _fetch(self, find: Callable[[str], WorkerView | None]) -> PlannedFetch | None:
        """None, too, when its source is gone: the prefix is computed then."""
        source = None if self.fetch is None else find(self.fetch.source)
        if self.fetch is None or source is None:
            return None
        return PlannedFetch(
            source=source, tokens=self.fetch.tokens, seconds=self.fetch.seconds, within_s=self.fetch.within_s
        )


_TICKET = msgspec.msgpack.Decoder(Ticket)


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketBoard:
    """Tickets in Redis. All methods raise `RedisUnavailableError`."""

    client: RedisClient
    keys: Keys

    async def issue(self, ticket_id: str, ticket: Ticket) -> None:
        await self.client.command(
            "SET", self.keys.ticket(ticket_id), msgspec.msgpack.encode(ticket), "PX", RESERVATION_MS
        )

    async def take(self, ticket_id: str) -> Ticket | None:
        """The ticket, which cannot be taken again; None when there is none.

        Raises `UnreadableReplyError` when what lay there is none, too.
        """
        reply = await self.client.command("GETDEL", self.keys.ticket(ticket_id))
        if reply is None:
            return None
        try:
            return decoded(reply, _TICKET.decode)
        except ValueError as error:
            raise self.client.unreadable("a ticket", error) from error


def _prompt_digest(query: RouteQuery) -> bytes:
    head = f"{query.model}\0{query.cache_salt}\0".encode("utf-8", "surrogatepass")
    return blake2b(head + array("q", query.token_ids).tobytes(), digest_size=16, salt=query.adapter).digest()


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


NO_TICKET = RouteTicket()
"""Of requests without one."""
