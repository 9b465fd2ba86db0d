"""What a worker knows of its own standing in the registry."""

from dataclasses import dataclass, field, replace

import pytest

from tandem_services.router.registry import HeartbeatReply, LeaseStatus, WorkerRecord, WorkerState
from tandem_services.worker.peers import PeerWatch
from tandem_services.worker.registration import Consequences, Registration
from tandem_testing.router_builders import make_record
from tandem_testing.service_clock import ServiceClock


@dataclass
class OneAnswer:
    """A registry that answers every heartbeat alike."""

    status: LeaseStatus = LeaseStatus.RENEWED

    async def heartbeat(self, record: WorkerRecord, **_: object) -> HeartbeatReply:
        del record
        return HeartbeatReply(status=self.status, by="d@2" if self.status is LeaseStatus.FENCED else "")


@dataclass
class QuietFeed:
    acknowledged: int = 0
    checked: list[object] = field(default_factory=list)

    def check(self, *cursor: object) -> None:
        self.checked.append(cursor)


@pytest.mark.asyncio
async def test_worker_is_offered_after_first_accepted_heartbeat():
    record = make_record("d")
    registry, clock, lost = OneAnswer(), ServiceClock(), []
    registration = Registration(
        registry=registry,
        describe=lambda: record,
        report_age_s=lambda: 0.0,
        silent_peers=tuple,
        feed=QuietFeed(),
        peers=PeerWatch(clock=clock, own=record.view.incarnation),
        clock=clock,
        consequences=Consequences(
            peer_gone=lambda _: None, fleet_changed=lambda: None, peers_missing=lambda: None, lost=lost.append
        ),
    )
    assert not registration.offered
    await registration.beat()
    assert registration.offered
    record = replace(record, state=WorkerState.PAUSED)
    assert registration.offered
    await registration.beat()
    assert not registration.offered
    record = replace(record, state=WorkerState.READY)
    registry.status = LeaseStatus.FENCED
    await registration.beat()
    assert not registration.offered
    assert len(lost) == 1


@dataclass
class Scripted:
    """A registry that gives one answer after the other, and keeps what was sent."""

    replies: list[HeartbeatReply]
    forged: list[str] = field(default_factory=list)

    async def heartbeat(self, record: WorkerRecord, *, forged: str, **_: object) -> HeartbeatReply:
        del record
        self.forged.append(forged)
        return self.replies.pop(0)


@pytest.mark.asyncio
async def test_verdict_without_a_signature_is_named_and_not_obeyed():
    record = make_record("d")
    registry, clock, lost = Scripted([]), ServiceClock(), []
    registration = Registration(
        registry=registry,
        describe=lambda: record,
        report_age_s=lambda: 0.0,
        silent_peers=tuple,
        feed=QuietFeed(),
        peers=PeerWatch(clock=clock, own=record.view.incarnation),
        clock=clock,
        consequences=Consequences(
            peer_gone=lambda _: None, fleet_changed=lambda: None, peers_missing=lambda: None, lost=lost.append
        ),
    )
    registry.replies += [
        HeartbeatReply(status=LeaseStatus.FENCED, forged="d@9 00"),
        HeartbeatReply(status=LeaseStatus.RENEWED),
        HeartbeatReply(status=LeaseStatus.FULL),
        HeartbeatReply(status=LeaseStatus.RENEWED),
    ]
    for _ in range(4):
        await registration.beat()
    assert (registry.forged, lost) == (["", "d@9 00", "", ""], [])
    assert registration.offered
