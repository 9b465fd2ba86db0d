"""Peer messages between engines of one process, through the real codec, lost or late as a test wants them."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tandem_engine.base.release import RELEASE
from tandem_engine.disaggregation.peers import PeerEvent, Superseded
from tandem_engine.messages.codec import Codec
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import PeerMessage

COMPAT = "shape-1"

M = TypeVar("M")


def make_peer(worker_id: str, number: int = 1, *, compat_hash: str = COMPAT, release: int = RELEASE) -> Peer:
    return Peer(
        worker_id=worker_id,
        incarnation=f"{worker_id}@{number}",
        endpoint=f"tcp://{worker_id}:1",
        compat_hash=compat_hash,
        release=release,
    )


@dataclass(kw_only=True)
class PeerNetwork:
    """Delivers messages by incarnation, at once and in order of sending unless they are delayed."""

    lost: Callable[[PeerMessage], bool] = field(default=lambda _message: False)
    """Messages for which this holds vanish on the way, as with a connection that breaks."""
    delay: Callable[[PeerMessage], int] = field(default=lambda _message: 0)
    """Ticks (calls of `advance`) that a message takes."""
    repeats: Callable[[PeerMessage], int] = field(default=lambda _message: 0)
    """How often a message comes again, at once."""
    now: int = 0
    links: "dict[str, MemoryLink]" = field(default_factory=dict)
    codec: Codec[PeerMessage] = field(default_factory=lambda: Codec(PeerMessage))

    _late: "list[tuple[int, MemoryLink, PeerMessage]]" = field(default_factory=list)
    """When each delayed message is due, and its receiver."""

    def join(self, me: Peer) -> "MemoryLink":
        link = MemoryLink(network=self, me=me)
        self.links[me.incarnation] = link
        return link

    def kill(self, incarnation: str) -> None:
        del self.links[incarnation]

    def deliver(self, target: "MemoryLink", message: PeerMessage) -> None:
        if self.lost(message):
            return
        message = self.codec.decode(self.codec.encode(message))
        ticks = self.delay(message)
        if ticks:
            self._late.append((self.now + ticks, target, message))
        else:
            target.inbox.extend([message] * (1 + self.repeats(message)))

    def advance(self) -> None:
        """One tick: deliver what is due."""
        self.now += 1
        for due, target, message in self._late:
            if due <= self.now:
                target.inbox.append(message)
        self._late = [late for late in self._late if late[0] > self.now]

    def in_flight(self) -> int:
        return len(self._late)


@dataclass(kw_only=True)
class MemoryLink:
    """`PeerLink` of one engine on a `PeerNetwork`."""

    network: PeerNetwork
    me: Peer
    inbox: deque[PeerEvent] = field(default_factory=deque)
    sent: list[PeerMessage] = field(default_factory=list)
    fenced: set[str] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    """Incarnations to which sending fails at once."""

    def send(self, peer: Peer, message: PeerMessage) -> bool:
        if peer.incarnation in self.unreachable:
            return False
        self.sent.append(message)
        target = self.network.links.get(peer.incarnation)
        if target is not None:
            self.network.deliver(target, message)
        return True

    def receive(self) -> Iterator[PeerEvent]:
        while self.inbox:
            yield self.inbox.popleft()

    def fence(self, incarnation: str) -> None:
        self.fenced.add(incarnation)

    def supersede(self, incarnation: str) -> None:
        """As if a newer incarnation of the worker had spoken."""
        self.inbox.append(Superseded(incarnation))

    def messages(self, kind: type[M]) -> list[M]:
        """What was sent of one kind, lost or not."""
        return [message for message in self.sent if isinstance(message, kind)]
