"""An engine's interface to other engines: the socket for messages, the transport of KV, the stage of handoffs.

1. opened    once the scheduler is there: the first rank binds its socket, then all ranks start the transport
             together and attach the stage. Without a port, or with --transport none, there is no transport
2. used      every iteration moves messages of peers to the inputs; the scheduler drives the stage
3. renamed   when the weights were replaced: KV of another `compat_hash` is exchanged with other peers
4. closed    the transport, then the socket, after the executor
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.release import RELEASE
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.peers import PeerChannels, PeerInbound
from tandem_engine.disaggregation.ranks.peers import PeerInputs, RankedPeers
from tandem_engine.disaggregation.ranks.transport import RankedTransport, RankNews, RankPlace
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.disaggregation.transport import HeadStates
from tandem_engine.engine.assembly import EngineParts
from tandem_engine.engine.loaded_model import Served
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.memory.state_pool import StatePool
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import Hello, PeerMessage
from tandem_engine.parallel.group import Parallel
from tandem_engine.parallel.inputs import FromPeer, LosePeer

if TYPE_CHECKING:
    import zmq


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePort:
    """How an engine is reached by its peers."""

    worker_id: str
    incarnation: str
    context: IpcContext
    host: str = LOOPBACK
    peer_port: int = 0


@dataclass(kw_only=True, slots=True)
class PeerSide:
    """All of it may be absent. Scheduler thread only."""

    socket: PeerChannels | None = None
    """Of the first rank, with a port."""
    transport: RankedTransport | None = None
    handoff: HandoffStage | None = None
    """With a transport."""
    ranked: RankedPeers | None = None
    """With a transport, of several ranks."""

    def open_port(self, port: EnginePort, served: Served) -> None:
        """Bind the peer socket. Raises `ConfigError` when the port is taken."""
        inbound: PeerInbound = PeerInbound(
            port.context, port.host, port.peer_port, inbound=PeerMessage, outbound=PeerMessage
        )
        me = Peer(
            worker_id=port.worker_id,
            incarnation=port.incarnation,
            endpoint=inbound.endpoint,
            compat_hash=served.compat_hash,
            release=RELEASE,
        )
        self.socket = PeerChannels(context=port.context, inbound=inbound, me=me)

    def open_transport(self, parts: EngineParts, served: Served, config: DisaggConfig, parallel: Parallel) -> None:
        """Start the transport and attach the stage, on all ranks if the first one has a port.

        Raises `TransportUnavailableError` when NIXL cannot be loaded.
        """
        agreement = parts.agreement
        names = agreement.share(() if self.socket is None else (self.socket.me,), tuple[Peer, ...])
        if not names:
            return
        me = names[0]
        place = RankPlace(
            rank=parallel.rank,
            size=parallel.size,
            kv_heads=served.kv_heads,
            states=divided(parts.pools.states, parallel.size),
        )
        self.transport = _nixl(parts, me, place, parallel)
        if parallel.size > 1:
            self.ranked = RankedPeers(me=me, least=agreement.least, socket=self.socket)
        peers = self.ranked or self.socket
        assert peers is not None, "rank 0 has a port"
        self.handoff = HandoffStage.build(
            host=parts.scheduler.for_stages,
            transport=self.transport,
            peers=peers,
            config=config,
            page_bytes=served.geometry.page_bytes * parallel.size,
            layers=parts.pool.layout.layers,
            state_bytes=0 if parts.pools.states is None else parts.pools.states.page_bytes * parallel.size,
        )
        parts.inputs.peers = PeerInputs(stage=self.handoff, peers=self.ranked)
        parts.scheduler.attach(self.handoff)

    @property
    def me(self) -> Peer:
        """This engine as its peers know it. Only with a port."""
        assert self.socket is not None, "an engine without a port has no peers"
        return self.socket.me

    @property
    def awaits_ranks(self) -> bool:
        """Another rank may be about to report, which wakes no thread here."""
        return self.transport is not None and self.transport.awaits_ranks

    def inputs(self) -> Iterator[FromPeer | LosePeer]:
        """Messages of peers to an engine of several ranks since the last call, to be submitted."""
        return iter(()) if self.ranked is None else self.ranked.inputs()

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """Sockets that peers speak to."""
        return [] if self.socket is None else [self.socket.inbound.socket]

    def descriptors(self) -> list[int]:
        """File descriptors that become readable when the transport has something to report."""
        return [] if self.transport is None else [self.transport.fileno()]

    def rename(self, compat_hash: str) -> None:
        """Notify the parts that speak to peers of the KV that they have now."""
        for peers in (self.socket, self.ranked):
            if peers is not None:
                peers.me = msgspec.structs.replace(peers.me, compat_hash=compat_hash)
        if self.handoff is not None and self.transport is not None:
            self.transport.rename(self.handoff.peers.me)

    def close(self) -> None:
        """Idempotent. Nothing may compute any more."""
        if self.transport is not None:
            self.transport.close()
        if self.socket is not None:
            self.socket.close()


def _nixl(parts: EngineParts, me: Peer, place: RankPlace, parallel: Parallel) -> RankedTransport:
    # Only an engine that transfers needs nixl installed.
    from tandem_engine.disaggregation.nixl.transport import NixlTransport

    agreement, clock = parts.agreement, MonotonicClock()
    return RankedTransport.build(
        local=NixlTransport(
            pool=parts.pool,
            states=parts.pools.states,
            me=place.agent(me),
            clock=clock,
            leave=parallel.departure.ask,
        ),
        me=me,
        place=place,
        gather_hellos=lambda hello: agreement.gather(hello, Hello),
        gather=lambda news: agreement.gather(news, RankNews),
        clock=clock,
    )


def divided(states: StatePool | None, ranks: int) -> HeadStates | None:
    """How `ranks` divide them, of which this process has one."""
    if states is None or not states.head_blocks:
        return None
    return HeadStates(heads=states.key_heads * ranks, head_bytes=sum(states.head_blocks))
