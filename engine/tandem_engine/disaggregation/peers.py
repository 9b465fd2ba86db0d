"""Messages between engines: one inbound socket, one outbound socket per incarnation and endpoint of a peer.

A channel to a peer is
    1. opened    by the first message to that incarnation at that endpoint. The registry may name another endpoint than
                 the peer itself, for instance a proxy: messages use the endpoint of their room, and a new endpoint
                 does not affect messages in flight to the other
    2. used      sends never block; a message that the peer does not read is dropped, and the caller notified
    3. closed    when the incarnation is fenced: superseded by a newer one, or its lease has expired

Inbound messages are trusted to come from this deployment (CURVE) but not to be current or well formed. Messages of a
superseded incarnation, of an engine whose KV has another shape (except for the end of what both started), or granted to
another writer are counted and dropped here. The stages only receive what concerns this engine [verified-pages].

`Incarnations` tracks which incarnation of each worker is accepted: `worker_id@number`, where the number grows with each
start of the worker
    1. unknown      it has sent no message
    2. current      the newest of its worker that has sent one
    3. superseded   a newer one has sent one: it is dead, and its messages are dropped from then on
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tandem_engine.base.errors import WireError
from tandem_engine.base.release import skew
from tandem_engine.ipc.channels import DealerChannel, IpcContext, RouterChannel
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import DrainAck, PeerMessage, PrefixAsk, TransferAborted, WriteGrant


class Observation(NamedTuple):
    """The sender of a message, as the message names it."""

    accepted: bool
    superseded: str | None = None
    """The older incarnation that this message proves dead."""


_NUMBER = re.compile(r"[0-9]{1,20}")
"""Bounded, because turning thousands of digits into a number is slow, and at some length refused."""


@dataclass(kw_only=True, slots=True)
class Incarnations:
    """The newest number received per worker."""

    newest: dict[str, int] = field(default_factory=dict)

    def observe(self, peer: Peer) -> Observation:
        """Judge the sender of a message. Raises `WireError` when its names contradict each other."""
        number = incarnation_number(peer)
        known = self.newest.get(peer.worker_id)
        if known is not None and number < known:
            return Observation(accepted=False)
        self.newest[peer.worker_id] = number
        if known is None or number == known:
            return Observation(accepted=True)
        return Observation(accepted=True, superseded=f"{peer.worker_id}@{known}")

    def is_superseded(self, peer: Peer) -> bool:
        """Whether a newer incarnation of the same worker has spoken."""
        return incarnation_number(peer) < self.newest.get(peer.worker_id, -1)


def obstacle(me: Peer, peer: Peer) -> str:
    """Why the engine `me` exchanges no KV with `peer`: KV of another shape, or another release; "" where it does."""
    if peer.compat_hash != me.compat_hash:
        return f"its KV or states are of another shape: {peer.compat_hash}, ours {me.compat_hash}"
    return skew(peer.release)


def incarnation_number(peer: Peer) -> int:
    """The number of `worker_id@number`. Raises `WireError` when `incarnation` is not the worker's."""
    worker_id, at, number = peer.incarnation.rpartition("@")
    if worker_id != peer.worker_id or not at or not _NUMBER.fullmatch(number):
        raise WireError(f"incarnation {peer.incarnation!r} is not a number of worker {peer.worker_id!r}")
    return int(number)


logger = logging.getLogger(__name__)

MAX_CHANNELS = 512
"""Open channels; the oldest makes room for the next. Processes have a limited number of sockets."""

ENDINGS = (TransferAborted, DrainAck)
"""Accepted from the other side of a room, whatever KV it has by now: it may have loaded other weights since
pages were granted, and unless both learn of the end those pages would stay in quarantine."""

PeerInbound = RouterChannel[PeerMessage, PeerMessage]


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer incarnation of the same worker has spoken: this one is dead."""

    incarnation: str


PeerEvent = PeerMessage | Superseded


class PeerLink(Protocol):
    """How the stages talk to other engines. Scheduler thread only; nothing blocks."""

    @property
    def me(self) -> Peer:
        """This engine, as peers know it."""
        ...

    def send(self, peer: Peer, message: PeerMessage) -> bool:
        """False when the message will certainly not arrive: dead incarnation, absurd address or full queue."""
        ...

    def receive(self) -> Iterator[PeerEvent]:
        """What has come since the last call, in order."""
        ...

    def fence(self, incarnation: str) -> None:
        """The peer is gone: close the channel to it. Idempotent."""
        ...


class PeerChannels:
    """`PeerLink` over ZMQ."""

    def __init__(self, *, context: IpcContext, inbound: PeerInbound, me: Peer) -> None:
        self._context = context
        self.me = me
        """This engine, as peers know it. Its `compat_hash` changes when its weights are replaced."""
        self._incarnations = Incarnations()
        self._channels: dict[tuple[str, str], DealerChannel[PeerMessage]] = {}
        """By incarnation and endpoint."""
        self.inbound = inbound
        """Owned by the caller's event loop for polling; closed here."""
        self._dropped = 0

    @property
    def refused(self) -> int:
        """Messages dropped since start: undecodable, stale, incompatible, or for another engine."""
        return self._dropped + self.inbound.refused

    @property
    def open_channels(self) -> list[tuple[str, str]]:
        """Incarnation and endpoint of each channel, the oldest first."""
        return [*self._channels]

    def send(self, peer: Peer, message: PeerMessage) -> bool:
        channel = self._channel_to(peer)
        return channel is not None and channel.send(message)

    def receive(self) -> Iterator[PeerEvent]:
        for _, message in self.inbound.receive():
            try:
                yield from self._admit(message)
            except WireError as error:
                self._drop(message, str(error))

    def fence(self, incarnation: str) -> None:
        for key in [key for key in self._channels if key[0] == incarnation]:
            self._channels.pop(key).close()

    def close(self) -> None:
        """Close every socket. Idempotent."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.inbound.close()

    def _channel_to(self, peer: Peer) -> DealerChannel[PeerMessage] | None:
        """None for a dead incarnation, and for a peer whose names or endpoint, as others gave them, make no sense."""
        try:
            if self._incarnations.is_superseded(peer):
                return None
            channel = self._channels.get((peer.incarnation, peer.endpoint))
            return channel or self._open(peer)
        except WireError as error:
            logger.warning("no channel to %r: %s", peer.incarnation, error)
            return None

    def _open(self, peer: Peer) -> DealerChannel[PeerMessage]:
        channel: DealerChannel[PeerMessage] = DealerChannel(self._context, peer.endpoint, outbound=PeerMessage)
        if len(self._channels) >= MAX_CHANNELS:
            self._channels.pop(next(iter(self._channels))).close()
        self._channels[peer.incarnation, peer.endpoint] = channel
        return channel

    def _admit(self, message: PeerMessage) -> Iterator[PeerEvent]:
        sender = message.sender
        if not isinstance(message, ENDINGS) and (problem := obstacle(self.me, sender)):
            raise WireError(problem)
        grant = message.grant if isinstance(message, PrefixAsk) else message
        if isinstance(grant, WriteGrant) and grant.writer != self.me.incarnation:
            raise WireError(f"granted to {grant.writer}")
        accepted, superseded = self._incarnations.observe(sender)
        if not accepted:
            raise WireError("a newer incarnation of this worker has spoken")
        if superseded is not None:
            yield Superseded(superseded)
        yield message

    def _drop(self, message: PeerMessage, why: str) -> None:
        self._dropped += 1
        logger.warning("dropped %s from %r: %s", type(message).__name__, message.sender.incarnation, why)
