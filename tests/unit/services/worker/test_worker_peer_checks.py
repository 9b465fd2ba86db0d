"""Peers that the registry names no longer are asked before they count as gone."""

from dataclasses import dataclass, field

import pytest

from tandem_engine.ipc.channels import IpcContext
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_services.worker.peers import ASK_AGAIN_S, PeerChecks, PeerWatch
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.service_clock import ServiceClock

PATIENCE_S = 60.0


@dataclass
class Verdicts:
    """The registry, as far as peers are concerned."""

    fenced: set[str] = field(default_factory=set)
    written: list[tuple[str, str]] = field(default_factory=list)
    reachable: bool = True

    async def snapshot(self, missing=()) -> FleetSnapshot:
        self.require()
        return FleetSnapshot(epoch="e", workers=(), malformed=0, fenced=frozenset(self.fenced & set(missing)))

    async def fence(self, incarnation: str, *, by: str) -> None:
        self.require()
        self.written.append((incarnation, by))

    def require(self) -> None:
        if not self.reachable:
            raise RedisUnavailableError("no answer")


@pytest.fixture
def rack():
    with EngineRack(context=IpcContext()) as engines:
        yield engines


@pytest.fixture
def clock():
    return ServiceClock()


@pytest.fixture
def watch(clock):
    return PeerWatch(clock=clock, own="me@1")


@pytest.fixture
def registry():
    return Verdicts()


@pytest.fixture
def gone():
    return []


@pytest.fixture
def checks(registry, watch, rack, gone):
    return PeerChecks(
        registry=registry, fleet=registry, watch=watch, context=rack.context, gone=gone.append, answer_s=PATIENCE_S
    )


def missing(watch: PeerWatch, *incarnations: str) -> None:
    watch.update("e", frozenset(incarnations))
    watch.update("e", frozenset())


async def test_missing_peer_that_answers_a_check_is_not_fenced(rack, watch, registry, checks, gone, clock):
    engine = rack.add("w", MockBehavior(token=hash_tokens(3, 9)))
    checks.observe([engine.view])
    missing(watch, "w@1")
    assert checks.pending
    await checks.run_due()
    assert (gone, registry.written, checks.pending) == ([], [], False)
    clock.advance(ASK_AGAIN_S)
    assert checks.pending


async def test_peer_that_does_not_answer_is_fenced(rack, watch, registry, checks, gone):
    engine = rack.add("w", MockBehavior(token=hash_tokens(3, 9), deaf=True))
    checks.observe([engine.view])
    checks.answer_s = 0.1
    missing(watch, "w@1")
    await checks.run_due()
    assert (gone, registry.written, checks.pending) == (["w@1"], [("w@1", "me@1")], False)


async def test_another_incarnation_at_the_address_is_no_answer(rack, watch, registry, checks, gone):
    engine = rack.add("w", MockBehavior(token=hash_tokens(3, 9)))
    checks.observe([engine.view])
    checks._endpoints["w@0"] = engine.view.request_endpoint
    checks.answer_s = 0.2
    missing(watch, "w@0")
    await checks.run_due()
    assert gone == ["w@0"]


async def test_peer_that_left_is_removed_without_probe(rack, watch, registry, checks, gone):
    engine = rack.add("w", MockBehavior(token=hash_tokens(3, 9)))
    checks.observe([engine.view])
    registry.fenced.add("w@1")
    missing(watch, "w@1")
    await checks.run_due()
    assert (gone, registry.written, engine.pings) == (["w@1"], [], 0)


async def test_peer_without_any_row_is_removed(watch, registry, checks, gone):
    missing(watch, "short@7")
    await checks.run_due()
    assert (gone, registry.written) == (["short@7"], [("short@7", "me@1")])


async def test_peers_are_kept_without_redis(watch, registry, checks, gone):
    registry.reachable = False
    missing(watch, "w@1")
    await checks.run_due()
    assert gone == []
    registry.reachable = True
    await checks.run_due()
    assert gone == ["w@1"]


async def test_verdict_that_redis_did_not_take_is_written_later(watch, registry, checks, gone):
    async def refuse(incarnation: str, *, by: str) -> None:
        raise RedisUnavailableError("no answer")

    kept, registry.fence = registry.fence, refuse
    missing(watch, "w@1")
    await checks.run_due()
    assert (gone, checks.pending) == (["w@1"], True)
    registry.fence = kept
    await checks.run_due()
    assert (registry.written, checks.pending) == ([("w@1", "me@1")], False)
