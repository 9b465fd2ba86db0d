"""What ends the standby of a worker: an operator, its revision's other workers, or the absence of any other worker."""

from dataclasses import dataclass, field

import pytest

from tandem_engine.config import Role
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.registry import WorkerRecord, WorkerState
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_services.worker.standby import ALONE_S, HOLD_S, UNTRIED_S, Standby, no_other_worker_serves
from tandem_testing.router_builders import make_record
from tandem_testing.service_clock import ServiceClock

NEW = {"compat_hash": "new"}
STANDBY = {"state": WorkerState.STANDBY, **NEW}


@dataclass
class FakeRegistry:
    records: list[WorkerRecord] = field(default_factory=list)
    away: bool = False

    async def snapshot(self, missing=()) -> FleetSnapshot:
        if self.away:
            raise RedisUnavailableError("away")
        return FleetSnapshot(epoch="e", workers=tuple(self.records), malformed=0)


class Sight:
    """A worker of the new revision on standby, its registry, and how often it reported its end there."""

    def __init__(self, role: Role = Role.DECODE) -> None:
        self.registry = FakeRegistry()
        self.clock = ServiceClock()
        self.reported = 0
        own = make_record("own", role, **STANDBY).view
        self.standby = Standby(on=True, fleet=self.registry, own=lambda: own, clock=self.clock, ended=self._tell)

    def _tell(self) -> None:
        self.reported += 1

    async def look(self, *others: WorkerRecord, later_s: float = 0.0) -> bool:
        """Whether it is offered after another look."""
        self.registry.records = list(others)
        self.clock.advance(later_s)
        await self.standby.look()
        return not self.standby.on


OLD_PAIR = (make_record("p1", Role.PREFILL), make_record("d1", Role.DECODE))


@pytest.fixture
def sight() -> Sight:
    return Sight()


async def test_standby_waits_for_offer_while_another_revision_serves(sight):
    sibling = make_record("p2", Role.PREFILL, **STANDBY)
    for _ in range(5):
        assert not await sight.look(*OLD_PAIR, sibling, later_s=ALONE_S)
    assert "canary" in sight.standby.check()
    sight.standby.offer("by order")
    sight.standby.offer("by order")
    assert sight.standby.check() is None
    assert sight.reported == 1
    await sight.standby.run()


SIBLING = make_record("p2", Role.PREFILL, **NEW)


async def test_standby_of_serving_revision_ends_without_canary(sight):
    """The operator that ran the canary need not be there any more: a replaced pod serves without it."""
    assert not await sight.look(*OLD_PAIR, SIBLING)
    assert not await sight.look(*OLD_PAIR, SIBLING, later_s=UNTRIED_S - 0.1)
    assert await sight.look(*OLD_PAIR, SIBLING, later_s=0.2)


async def test_standby_waits_for_offer_during_its_canary(sight):
    """A pod of a proved revision that fails itself, on a node with a broken device: no client ever reaches it."""
    await sight.look(*OLD_PAIR, SIBLING)
    for _ in range(5):
        sight.standby.hold()
        assert not await sight.look(*OLD_PAIR, SIBLING, later_s=HOLD_S - 0.1)
    assert await sight.look(*OLD_PAIR, SIBLING, later_s=0.2), "whoever tried it has gone"


async def test_briefly_seen_revision_peer_does_not_end_standby(sight):
    await sight.look(*OLD_PAIR, SIBLING)
    await sight.look(*OLD_PAIR)
    assert not await sight.look(*OLD_PAIR, SIBLING, later_s=UNTRIED_S)
    sight.registry.away = True
    await sight.look()
    sight.registry.away = False
    assert not await sight.look(*OLD_PAIR, SIBLING, later_s=UNTRIED_S)


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.READY])
async def test_only_offered_worker_proves_its_revision(sight, state):
    assert not await sight.look(*OLD_PAIR, make_record("p2", Role.PREFILL, state=state, **NEW), later_s=ALONE_S)


async def test_standby_serves_after_a_delay_without_other_workers(sight):
    assert not await sight.look()
    assert not await sight.look(later_s=ALONE_S - 0.1)
    assert await sight.look(later_s=0.2)


async def test_wiped_registry_is_no_reason(sight):
    """The workers of old register again within a heartbeat or two; with Redis away the serving workers are unknown."""
    await sight.look()
    assert not await sight.look(*OLD_PAIR, later_s=ALONE_S)
    sight.registry.away = True
    assert not await sight.look(later_s=ALONE_S)
    sight.registry.away = False
    assert not await sight.look(later_s=ALONE_S)
    assert not await sight.look(later_s=ALONE_S - 0.1)


def test_other_serving_workers_are_detected_by_role_and_state():
    prefill, decode = (make_record("own", role, **STANDBY).view for role in (Role.PREFILL, Role.DECODE))
    assert no_other_worker_serves(decode, [])
    assert no_other_worker_serves(decode, [make_record("p1", Role.PREFILL)])
    assert not no_other_worker_serves(decode, OLD_PAIR)
    assert not no_other_worker_serves(prefill, []), "alone it could not answer anybody"
    assert not no_other_worker_serves(prefill, [make_record("d1", Role.DECODE, state=WorkerState.STANDBY)])
    assert no_other_worker_serves(prefill, [make_record("d2", Role.DECODE, **STANDBY)])


async def test_another_models_workers_count_for_nothing(sight):
    await sight.look(make_record("d1", Role.DECODE, model="other"))
    assert await sight.look(make_record("d1", Role.DECODE, model="other"), later_s=ALONE_S)
