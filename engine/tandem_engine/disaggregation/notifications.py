"""How rooms end: the messages of every side, and the terminal messages that are kept for repetition.

    early      TransferAborted ─▶ DrainAck                  the pages of the hold are free
               TransferAborted ─▶ silence ─▶ quarantine     and the question again every `drain_timeout`, until the
                                                            writer is fenced
    finished   writer      every push is out ─▶ `record_of` ─▶ `HandoffRecord`
               receiver    `HandoffRecord` ─▶ `problem_with` ─▶ digests ─▶ its request continues

A receiver validates the record of a peer (`problem_with`) as strictly as a client's request.

`FinalMessages` keeps the terminal messages of rooms that are over, in case they did not arrive.
    1. kept      when a room is handed over, closed or rejected: its `HandoffRecord` or `TransferAborted`
    2. repeated  unchanged whenever the receiver asks about the room: a repeated message changes nothing
                 [writes-repeat]
    3. dropped   when no receiver waits for it any more, or for newer ones
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from msgspec import UNSET

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import TransferError
from tandem_engine.disaggregation.base import RoomKey
from tandem_engine.disaggregation.grants import Grant
from tandem_engine.disaggregation.holds import HoldState, HoldTable, TransferHold
from tandem_engine.disaggregation.outgoing_transfer import SendRoom
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import HandoffSide, Peer, about_attempt
from tandem_engine.messages.transfer import STATES, GroupDigests, HandoffRecord, PrefixRecord, TransferAborted
from tandem_engine.scheduler.request import Request

logger = logging.getLogger(__name__)
HANDOFF = "handoff"


def notify_ended(
    peers: PeerLink, peer: Peer, key: RoomKey, *, side: HandoffSide, reason: str, finished: bool = False
) -> TransferAborted:
    """This engine, which is `side` of room `key`, is done with it [abort-both-ways]. Returns the message."""
    message = TransferAborted(
        room=key.room, generation=key.generation, sender=peers.me, side=side, reason=reason, finished=finished
    )
    peers.send(peer, message)
    return message


def ask_for_ack(hold: TransferHold, *, holds: HoldTable, peers: PeerLink, of: str) -> bool:
    """The ack of `hold` is overdue: its pages go into quarantine, and the writer is asked again.

    The question or the answer may have been lost with a connection, so this is done after every `drain_timeout`.
    True the first time. A fenced writer is not asked: its pages are free after `FENCED_AT_MAX_S`.
    `of`: what the hold is of, for the log and the writer.
    """
    if hold.state is HoldState.FENCED:
        logger.warning("cannot determine whether %s has exited; releasing its pages", hold.writer.incarnation)
        holds.ended(hold.writer.incarnation)
        return False
    first = hold.state is HoldState.DRAINING
    if first:
        logger.warning(
            "%s %r: %s did not acknowledge the end; quarantining %d pages",
            of,
            str(hold.key),
            hold.writer.incarnation,
            len(hold.pages),
            # Gateways name the room of a handoff after the attempt, which may be forgotten here by now.
            extra={"fields": about_attempt(hold.key.room) if of == HANDOFF else {}},
        )
    holds.quarantine(hold)
    reason = f"waiting for the drain ack of a {of}"
    notify_ended(peers, hold.writer, hold.key, side=HandoffSide.RECEIVE, reason=reason)
    return first


def transfer_failed(reason: str) -> Finish:
    """The transfer failed, the request did not: the gateway sends it to another worker and the stream continues."""
    return Finish(
        reason=FinishReason.ERROR, error=f"KV transfer failed: {reason}", code=TransferError.code, retryable=True
    )


def record_of(
    room: SendRoom, grant: Grant, *, sender: Peer, ranks: int, packed: bool, exposed_s: float
) -> HandoffRecord:
    """What `sender` has written into the pages of `grant`, on so many ranks, packed or not."""
    req = room.req
    resumed_len = room.total - req.prompt_len
    return HandoffRecord(
        room=room.key.room,
        generation=room.key.generation,
        sender=sender,
        first_token=grant.first_token,
        pages=len(grant.pages),
        digests=room.all_digests(),
        output_ids=tuple(req.output_ids[resumed_len:]),
        logprobs=tuple(req.logprobs) if req.sampling.logprobs is not None else None,
        cached_tokens=req.cached_tokens,
        cache_hits=req.cache_hits,
        exposed_s=exposed_s,
        ranks=ranks,
        groups=UNSET if grant.state is None else (GroupDigests(group=STATES, digests=room.state_digests),),
        packed=packed,
        ended_by_grammar=req.grammar is not None and req.grammar.matcher.ended,
    )


def digests_of(record: HandoffRecord | PrefixRecord) -> tuple[int, ...]:
    """Of its pages, then of the state where there is one: in the order of a `DigestOrder`."""
    if record.groups is UNSET:
        return record.digests
    return (*record.digests, *chain.from_iterable(group.digests for group in record.groups))


def problem_with(
    record: HandoffRecord, req: Request, *, granted: int, first_token: int, vocab_size: int, stateful: bool = False
) -> str | None:
    """Why `req`, for which `granted` pages from `first_token` on were granted, cannot continue from `record`.

    `stateful`: and a place for its state.
    """
    if record.first_token != first_token or record.pages != granted:
        return (
            f"the writer reports {record.pages} pages from token {record.first_token}; "
            f"{granted} from token {first_token} were granted"
        )
    if len(record.digests) != granted:
        return f"{len(record.digests)} digests for {granted} pages"
    return problem_with_groups(record, states=int(stateful)) or _problem_with_output(record, req, vocab_size)


def problem_with_groups(record: HandoffRecord | PrefixRecord, *, states: int) -> str | None:
    """Why `record` does not prove so many states; None if it does."""
    groups = () if record.groups is UNSET else record.groups
    found = [(each.group, len(each.digests)) for each in groups]
    if found != [(STATES, 1)] * states:
        return f"digests of further groups, as (group, number): {found}; {states} states were granted"
    return None


def _problem_with_output(record: HandoffRecord, req: Request, vocab_size: int) -> str | None:
    if len(record.output_ids) != 1:
        return f"{len(record.output_ids)} tokens handed over instead of one"
    if not 0 <= record.output_ids[0] < vocab_size:
        return f"token id {record.output_ids[0]} handed over, the vocabulary ends at {vocab_size - 1}"
    wanted = 0 if req.sampling.logprobs is None else 1
    if len(record.logprobs or ()) != wanted:
        return f"{len(record.logprobs or ())} logprobs handed over instead of {wanted}"
    return None


MAX_FINAL_MESSAGES = 1024
"""Kept at a time; beyond, the oldest goes, and its room is only known to be closed."""


class _FinalMessage(NamedTuple):
    message: HandoffRecord | TransferAborted
    to: str
    until: float


@dataclass(kw_only=True, slots=True)
class FinalMessages:
    """Of one engine. Scheduler thread only."""

    clock: Clock
    keep_s: float
    """As long as a receiver waits without a sign of life."""
    capacity: int = MAX_FINAL_MESSAGES
    _messages: OrderedDict[RoomKey, _FinalMessage] = field(default_factory=OrderedDict)

    def keep(self, key: RoomKey, peer: Peer, message: HandoffRecord | TransferAborted) -> None:
        """`message` is the end of the room, as far as `peer` is concerned."""
        self._messages.pop(key, None)
        self._messages[key] = _FinalMessage(message, peer.incarnation, self.clock.now() + self.keep_s)
        if len(self._messages) > self.capacity:
            self._messages.popitem(last=False)

    def sent_to(self, key: RoomKey, peer: Peer) -> HandoffRecord | TransferAborted | None:
        """The final message to `peer` in this room, if it is still known."""
        sent = self._messages.get(key)
        return sent.message if sent is not None and sent.to == peer.incarnation else None

    def drop_expired(self) -> None:
        now = self.clock.now()
        # The oldest come first, and all are kept for the same time.
        while self._messages and next(iter(self._messages.values())).until <= now:
            self._messages.popitem(last=False)

    def drop_to(self, incarnation: str) -> None:
        """The receiver is dead."""
        for key in [key for key, sent in self._messages.items() if sent.to == incarnation]:
            del self._messages[key]
