"""What every side of a transfer says when a room ends early, and how it asks for the ack that frees its pages.

TransferAborted ─▶ DrainAck            the pages of the hold are free
TransferAborted ─▶ silence ─▶ quarantine, and the question again every `drain_timeout`, until the writer is fenced
"""

import logging

from tandem_engine.disaggregation.holds import HoldState, HoldTable, TransferHold
from tandem_engine.disaggregation.peers import PeerLink
from tandem_engine.disaggregation.room_key import RoomKey
from tandem_engine.messages.requests import HandoffSide, Peer, about_attempt
from tandem_engine.messages.transfer import TransferAborted

logger = logging.getLogger(__name__)

HANDOFF = "handoff"


def tell_ended(
    peers: PeerLink, peer: Peer, key: RoomKey, *, side: HandoffSide, reason: str, finished: bool = False
) -> TransferAborted:
    """This engine, which is `side` of room `key`, is done with it [abort-both-ways]. Returns what was said."""
    message = TransferAborted(
        room=key.room, generation=key.generation, sender=peers.me, side=side, reason=reason, finished=finished
    )
    peers.send(peer, message)
    return message


def ask_for_ack(hold: TransferHold, *, holds: HoldTable, peers: PeerLink, of: str) -> bool:
    """The ack of `hold` is overdue: its pages go into quarantine, and the writer is asked again.

    The question or the answer may have been lost with a connection, so this is done after every `drain_timeout`.
    True the first time. A fenced writer is not asked: its pages are free after `FENCED_AT_MOST_S`.
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
    tell_ended(peers, hold.writer, hold.key, side=HandoffSide.RECEIVE, reason=reason)
    return first
