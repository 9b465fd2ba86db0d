"""An engine of several ranks on the fake model, to take a side of a `disagg_pair.Pair`.

Every rank has a scheduler, a pool with its heads and the transfer stages, and steps on a thread of its own. What
happens to one happens to all before the next step, as `scheduler.lockstep` has it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tandem_engine.base.names import RequestId
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.ranks.peers import PeerInputs, RankedPeers
from tandem_engine.disaggregation.ranks.slices import heads_on
from tandem_engine.disaggregation.ranks.transport import RankedTransport, RankPlace
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.messages.control import PauseMode
from tandem_engine.messages.outputs import Finish
from tandem_engine.messages.requests import GenerateRequest, Peer
from tandem_engine.parallel.inputs import Input
from tandem_engine.scheduler.lockstep import apply
from tandem_testing.disagg_network import PeerNetwork
from tandem_testing.disagg_pair import CONFIG, Side
from tandem_testing.fake_transport import FakeFabric
from tandem_testing.rank_fabric import Meeting
from tandem_testing.scheduler_builders import Engine, ManualClock, Received, make_engine

KV_HEADS = 4


def everywhere(engines: Sequence[Engine], work: Callable[[Engine], object]) -> None:
    """On each rank's thread: whatever a scheduler does may have it talk to the others."""
    with ThreadPoolExecutor(len(engines)) as threads:
        [*threads.map(work, engines)]


@dataclass(kw_only=True)
class AllSchedulers:
    """Does the same to the schedulers of all ranks."""

    engines: Sequence[Engine]

    @property
    def idle(self) -> bool:
        first, *others = (engine.scheduler.idle for engine in self.engines)
        assert all(other is first for other in others), "the ranks disagree on whether there is work"
        return first

    def abort(self, rid: RequestId) -> None:
        everywhere(self.engines, lambda engine: engine.scheduler.abort(rid))

    def pause(self, mode: PauseMode) -> None:
        everywhere(self.engines, lambda engine: engine.scheduler.pause(mode))

    def resume(self) -> None:
        everywhere(self.engines, lambda engine: engine.scheduler.resume())


@dataclass(kw_only=True)
class RankedEngine:
    """What tests touch of an `Engine`. Clients get rank 0's messages; those of the others are the same, which is
    checked."""

    engines: Sequence[Engine]
    peers: Sequence[RankedPeers]
    inputs: Sequence[PeerInputs]
    clock: ManualClock = field(default_factory=ManualClock)

    @property
    def scheduler(self) -> AllSchedulers:
        return AllSchedulers(engines=self.engines)

    @property
    def received(self) -> dict[str, Received]:
        return self.engines[0].received

    @property
    def messages(self) -> dict[str, GenerateRequest]:
        return self.engines[0].messages

    def add(self, message: GenerateRequest) -> None:
        everywhere(self.engines, lambda engine: engine.add(message))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._turn()

    def finish(self, rid: str = "r") -> Finish | None:
        return self.engines[0].finish(rid)

    def assert_nothing_held(self) -> None:
        for engine in self.engines:
            engine.assert_nothing_held()
            assert engine.deliveries == self.engines[0].deliveries, "the ranks say different things"

    def _turn(self) -> None:
        for engine in self.engines:
            engine.clock.time = self.clock.time
        for item in [*self.peers[0].inputs()]:
            self.submit(item)
        everywhere(self.engines, lambda engine: engine.scheduler.step())

    def submit(self, item: Input) -> None:
        """Have it happen to all ranks."""
        inputs = {id(engine): peers for engine, peers in zip(self.engines, self.inputs, strict=True)}
        everywhere(self.engines, lambda engine: apply(engine.scheduler, item, peers=inputs[id(engine)]))


def make_ranked_side(
    peer: Peer,
    size: int,
    *,
    fabric: FakeFabric,
    network: PeerNetwork,
    config: DisaggConfig = CONFIG,
    **engine: object,
) -> Side:
    """A side with `size` ranks that share `KV_HEADS` heads."""
    news, agreed = Meeting(size), Meeting(size)
    places = [RankPlace(rank=rank, size=size, kv_heads=KV_HEADS) for rank in range(size)]
    built = [make_engine(**engine, num_kv_heads=len(heads_on(KV_HEADS, rank=0, size=size))) for _ in places]
    locals_ = [
        fabric.join(place.agent(peer), one.model.pool, one.clock) for place, one in zip(places, built, strict=True)
    ]
    hellos = [transport.hello() for transport in locals_]
    link = network.join(peer)
    peers, inputs = [], []
    for place, one, local in zip(places, built, locals_, strict=True):
        transport = RankedTransport.build(
            local=local,
            me=peer,
            place=place,
            gather_hellos=lambda _hello: hellos,
            gather=news.gather(place.rank),
            clock=one.clock,
        )
        gather = agreed.gather(place.rank)
        peers.append(
            RankedPeers(
                me=peer,
                least=lambda values, gather=gather: [min(column) for column in zip(*gather(values), strict=True)],
                socket=link if place.rank == 0 else None,
            )
        )
        stage = HandoffStage.build(
            host=one.scheduler.for_stages,
            transport=transport,
            peers=peers[-1],
            config=config,
            page_bytes=one.model.pool.page_bytes * size,
            layers=one.model.pool.layout.layers,
        )
        one.scheduler.attach(stage)
        inputs.append(PeerInputs(stage=stage, peers=peers[-1]))
    whole = RankedEngine(engines=built, peers=peers, inputs=inputs)
    return Side(peer=peer, engine=whole, stage=inputs[0].stage, transport=locals_[0], link=link)
