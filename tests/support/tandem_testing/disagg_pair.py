"""Engines on the fake model with both transfer stages, alone or as a prefill/decode pair in one process."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.messages.outputs import Finish
from tandem_engine.messages.requests import Handoff, HandoffSide, Peer
from tandem_testing.disagg_network import MemoryLink, PeerNetwork, make_peer
from tandem_testing.fake_transport import FakeFabric, FakeTransport
from tandem_testing.scheduler_builders import Engine, expected_output, make_engine, make_message

PROMPT = tuple(range(1, 11))
"""Two and a half pages of four tokens."""
GRANT_TIMEOUT = 8.0
HOLD_TIMEOUT = 6.0
DRAIN_TIMEOUT = 5.0
CONFIG = DisaggConfig(grant_timeout=GRANT_TIMEOUT, hold_timeout=HOLD_TIMEOUT, drain_timeout=DRAIN_TIMEOUT)


@dataclass(kw_only=True)
class Side:
    """One engine with its transfer stages."""

    peer: Peer
    engine: Engine
    stage: HandoffStage
    transport: FakeTransport
    link: MemoryLink

    def step(self, times: int = 1) -> None:
        self.engine.step(times)

    def finish(self, rid: str = "r") -> Finish | None:
        return self.engine.finish(rid)

    def tokens(self, rid: str = "r") -> list[int]:
        return self.engine.received[rid].tokens if rid in self.engine.received else []

    def assert_clean(self) -> None:
        """Idle, and every page is free or cached."""
        assert self.engine.scheduler.idle
        assert [*self.stage.held_pages()] == []
        self.engine.assert_nothing_held()


def make_side(
    peer: Peer, *, fabric: FakeFabric, network: PeerNetwork, config: DisaggConfig = CONFIG, **engine: object
) -> Side:
    built = make_engine(**engine)
    states = built.model.states
    transport = fabric.join(peer, built.model.pool, built.clock, states)
    link = network.join(peer)
    stage = HandoffStage.build(
        host=built.scheduler.for_stages,
        transport=transport,
        peers=link,
        config=config,
        page_bytes=built.model.pool.page_bytes,
        layers=built.model.pool.layout.layers,
        state_bytes=0 if states is None else states.page_bytes,
    )
    built.scheduler.attach(stage)
    return Side(peer=peer, engine=built, stage=stage, transport=transport, link=link)


def handoff(side: HandoffSide, peer: Peer, room: str, generation: int = 1, *, keeps_session: bool = False) -> Handoff:
    return Handoff(side=side, room=room, generation=generation, peer=peer, keeps_session=keeps_session)


@dataclass(kw_only=True)
class Pair:
    """A prefill and a decode engine. Time stands still but for `pass_time`."""

    fabric: FakeFabric
    network: PeerNetwork
    prefill: Side
    decode: Side

    def submit(self, rid: str = "r", prompt: Sequence[int] = PROMPT, **request: object) -> str:
        """Send both ends of a request, as a gateway does. Its room is `room-<rid>`."""
        self.submit_decode(rid, prompt, **request)
        self.submit_prefill(rid, prompt, **request)
        return rid

    def submit_prefill(
        self, rid: str = "r", prompt: Sequence[int] = PROMPT, *, keeps_session: bool = False, **request: object
    ) -> None:
        end = handoff(HandoffSide.SEND, self.decode.peer, f"room-{rid}", keeps_session=keeps_session)
        self.prefill.engine.add(make_message(rid, prompt, handoff=end, **request))

    def submit_decode(self, rid: str = "r", prompt: Sequence[int] = PROMPT, **request: object) -> None:
        end = handoff(HandoffSide.RECEIVE, self.prefill.peer, f"room-{rid}")
        self.decode.engine.add(make_message(rid, prompt, handoff=end, **request))

    def turn(self, times: int = 1) -> None:
        """A step of each engine, and one tick of the fabric and the network between them."""
        for _ in range(times):
            self.prefill.step()
            self.network.advance()
            self.fabric.advance()
            self.decode.step()

    def run(self, max_turns: int = 2000, seconds_per_turn: float = 0.0) -> None:
        """Until both engines are idle and no pages are held."""
        for _ in range(max_turns):
            if self.at_rest():
                return
            self.turn()
            self.pass_time(seconds_per_turn)
        raise AssertionError(f"not at rest after {max_turns} turns")

    def at_rest(self) -> bool:
        sides = (self.prefill, self.decode)
        return (
            all(side.engine.scheduler.idle and not [*side.stage.held_pages()] for side in sides)
            and not self.fabric.in_flight()
            and not self.network.in_flight()
            and not any(side.link.inbox or side.transport.events for side in sides)
        )

    def pass_time(self, seconds: float) -> None:
        self.prefill.engine.clock.time += seconds
        self.decode.engine.clock.time += seconds

    def expected(self, rid: str = "r") -> list[int]:
        """The whole output, resumed tokens included."""
        return expected_output(self.decode.engine.messages[rid])

    def assert_clean(self) -> None:
        self.prefill.assert_clean()
        self.decode.assert_clean()


def make_pair(
    *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None, **both: object
) -> Pair:
    """Two engines; `both` goes to each, `prefill` and `decode` to one."""
    fabric, network = FakeFabric(), PeerNetwork()
    parts = {"fabric": fabric, "network": network}
    return Pair(
        fabric=fabric,
        network=network,
        prefill=make_side(make_peer("p"), **parts, **{**both, **(prefill or {})}),
        decode=make_side(make_peer("d"), **parts, **{**both, **(decode or {})}),
    )
