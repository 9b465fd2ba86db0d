"""`PeerLink` of one of several ranks: rank 0 sends and receives for all of them.

    rank 0   socket ─▶ `inputs` ─▶ submitted ─┐                      ┌─▶ on_peer_message ─▶ receive ─▶ stages
                                              ├─ agree (lockstep) ───┤
    others                                    ┘                      └─▶ on_peer_message ─▶ receive ─▶ stages

send: the stages of every rank send the same messages in the same order. Rank 0 sends them for all, and all ranks get
the result.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem_engine.disaggregation.peers import PeerEvent, PeerLink, Superseded
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import PeerMessage
from tandem_engine.parallel.agreement import Least
from tandem_engine.parallel.inputs import FromPeer, LosePeer


@dataclass(kw_only=True, slots=True)
class RankedPeers:
    """One rank's end. Scheduler thread only."""

    me: Peer
    least: Least
    socket: PeerLink | None
    """Of rank 0 alone."""
    _received: deque[PeerMessage] = field(default_factory=deque)

    def inputs(self) -> Iterator[FromPeer | LosePeer]:
        """What has come since the last call, to be submitted. Nothing on ranks that are not the first."""
        for event in () if self.socket is None else self.socket.receive():
            if isinstance(event, Superseded):
                yield LosePeer(incarnation=event.incarnation)
            else:
                yield FromPeer(message=event)

    def on_peer_message(self, message: PeerMessage) -> None:
        """All ranks have this message in this turn."""
        self._received.append(message)

    # PeerLink

    def send(self, peer: Peer, message: PeerMessage) -> bool:
        sent = self.socket is None or self.socket.send(peer, message)
        return bool(self.least([int(sent)])[0])

    def receive(self) -> Iterator[PeerEvent]:
        while self._received:
            yield self._received.popleft()

    def fence(self, incarnation: str) -> None:
        if self.socket is not None:
            self.socket.fence(incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerInputs:
    """What inputs do to an engine's transfers. Implements `PeerAware`."""

    stage: HandoffStage
    peers: RankedPeers | None
    """Of one of several ranks; an engine with one rank gets messages of peers from its socket."""

    def on_peer_message(self, message: PeerMessage) -> None:
        assert self.peers is not None, "an engine that is alone submits no messages of peers"
        self.peers.on_peer_message(message)

    def peer_gone(self, incarnation: str) -> None:
        self.stage.peer_gone(incarnation)

    def peer_ended(self, incarnation: str) -> None:
        self.stage.peer_ended(incarnation)

    def meet(self, peers: Sequence[Peer]) -> None:
        self.stage.links.meet(peers)
