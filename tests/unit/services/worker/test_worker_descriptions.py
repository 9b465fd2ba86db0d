"""When a worker describes itself to the registry, and its set of members."""

from dataclasses import dataclass, field, replace

import pytest

from tandem_engine.messages.stats import LinkReport
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.keys import DESCRIBE_EVERY_S, HEARTBEAT_S, SMALL_FLEET
from tandem_services.router.registry import HeartbeatReply, LeaseStatus, WorkerRecord, WorkerState
from tandem_services.router.views.fleet_reader import LISTED_A_SECOND
from tandem_services.worker.peers import PeerWatch
from tandem_services.worker.registration import Consequences, Registration
from tandem_testing.router_builders import make_load, make_record
from tandem_testing.service_clock import ServiceClock


@dataclass
class Board:
    """A registry that gives the next answer, and notes which heartbeats brought a description."""

    workers: int = 1
    answer: HeartbeatReply | None = None
    away: bool = False
    described: list[bool] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    async def heartbeat(self, record: WorkerRecord, *, known_generation: int, describe: bool, **_: object):
        del record
        self.described.append(describe)
        self.generations.append(known_generation)
        if self.away:
            raise RedisUnavailableError("away")
        return self.answer or HeartbeatReply(status=LeaseStatus.RENEWED, workers=self.workers)


@dataclass
class Worker:
    record: WorkerRecord = field(default_factory=lambda: make_record("d"))
    board: Board = field(default_factory=Board)
    clock: ServiceClock = field(default_factory=ServiceClock)
    acknowledged: int = 0
    gone: list[str] = field(default_factory=list)
    changes: int = 0

    def __post_init__(self) -> None:
        self.peers = PeerWatch(clock=self.clock, own=self.record.view.incarnation)
        self.registration = Registration(
            registry=self.board,
            describe=lambda: self.record,
            report_age_s=lambda: 0.0,
            silent_peers=tuple,
            feed=self,
            peers=self.peers,
            clock=self.clock,
            consequences=Consequences(
                peer_gone=self.gone.append, fleet_changed=self._changed, peers_missing=lambda: None, lost=lambda _: None
            ),
        )

    def check(self, *_: object) -> None:
        """Of the index feed."""

    def _changed(self) -> None:
        self.changes += 1

    async def beats(self, count: int) -> list[bool]:
        """Which of the next heartbeats bring a description."""
        self.board.described.clear()
        for _ in range(count):
            await self.registration.beat()
            self.clock.advance(HEARTBEAT_S)
        return self.board.described


@pytest.fixture
def worker():
    return Worker()


@pytest.mark.parametrize("workers", [1, 2, SMALL_FLEET])
async def test_worker_of_a_small_fleet_always_describes_itself(worker, workers):
    worker.board.workers = workers
    assert await worker.beats(5) == [True] * 5


async def test_worker_of_a_large_fleet_describes_itself_at_times(worker):
    worker.board.workers = 100_000
    period = int(DESCRIBE_EVERY_S / HEARTBEAT_S)
    assert await worker.beats(2 * period) == ([True] + [False] * (period - 1)) * 2


@pytest.mark.parametrize(
    ("change", "is_news"),
    [
        ({"state": WorkerState.DRAINING}, True),
        ({"links": (LinkReport(peer="p@1", bytes_per_s=1e9, broken=True),)}, True),
        ({"links": (LinkReport(peer="p@1", bytes_per_s=1e9),)}, False),
        ({"load": make_load(queue_tokens=7)}, False),
        ({"details": {"running": 3}}, False),
    ],
)
async def test_relevant_changes_are_sent_with_the_next_heartbeat(worker, change, is_news):
    worker.board.workers = 100_000
    await worker.beats(2)
    worker.record = replace(worker.record, **change)
    assert await worker.beats(2) == [is_news, False]


async def test_description_that_redis_lost_is_sent_again(worker):
    worker.board.workers = 100_000
    await worker.beats(2)
    worker.board.away = True
    worker.record = replace(worker.record, state=WorkerState.PAUSED)
    assert await worker.beats(2) == [True, True], "Redis has not taken it"
    worker.board.away = False
    assert await worker.beats(2) == [True, False]
    worker.board.answer = HeartbeatReply(status=LeaseStatus.RENEWED, workers=100_000, undescribed=True)
    await worker.beats(1)
    worker.board.answer = None
    assert await worker.beats(2) == [True, False]


async def test_known_members_follow_joins_and_leaves(worker):
    def answer(generation: int, **changes: tuple[str, ...]) -> HeartbeatReply:
        return HeartbeatReply(status=LeaseStatus.RENEWED, epoch="e", generation=generation, workers=3, **changes)

    for reply, known, missing in (
        (answer(5, members=("d@1", "a@1", "b@1")), {"a@1", "b@1"}, set()),
        (answer(5), {"a@1", "b@1"}, set()),
        (answer(8, joined=("c@1",), left=("a@1",)), {"b@1", "c@1"}, {"a@1"}),
        (answer(9, joined=("b@2",), left=("b@1", "never@1")), {"b@2", "c@1"}, {"a@1"}),
        (answer(10, joined=("a@1", "d@1")), {"a@1", "b@2", "c@1"}, set()),
    ):
        worker.board.answer = reply
        await worker.registration.beat()
        assert worker.peers._known == known
        assert worker.peers.due() == missing
    assert worker.gone == ["b@1"], "a newer incarnation has its name"
    assert worker.board.generations == [0, 5, 5, 8, 9]
    assert worker.changes == 4


async def test_change_that_redis_hid_is_in_the_next_list(worker):
    def answer(*members: str) -> HeartbeatReply:
        reply = HeartbeatReply(status=LeaseStatus.RENEWED, epoch="e", generation=5, workers=4 * LISTED_A_SECOND)
        return replace(reply, members=members) if members else reply

    for members, known, missing, changes in (
        (("d@1", "a@1", "b@1"), {"a@1", "b@1"}, set(), 1),
        (("d@1", "b@1", "c@1"), {"b@1", "c@1"}, {"a@1"}, 2),
        (("d@1", "b@1", "c@1"), {"b@1", "c@1"}, {"a@1"}, 2),
    ):
        worker.board.generations.clear()
        worker.board.answer = answer(*members)
        await worker.beats(1)
        worker.board.answer = answer()
        await worker.beats(3)
        assert worker.board.generations == [0, 5, 5, 5]
        assert (worker.peers._known, worker.peers.due(), worker.changes) == (known, missing, changes)
