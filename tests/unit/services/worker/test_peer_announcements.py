"""Peers that a worker connects to."""

import asyncio

import pytest

from tandem_engine.base.release import RELEASE, WINDOW
from tandem_engine.config import Role
from tandem_engine.messages.control import MAX_LINKS, MeetPeers
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_services.worker.peers import PeerAnnouncements, peers_to_connect
from tandem_testing.router_builders import make_record, make_view

FLEET = [
    make_view("p1", Role.PREFILL),
    make_view("p2", Role.PREFILL),
    make_view("d1", Role.DECODE),
    make_view("d2", Role.DECODE),
    make_view("b1", Role.BOTH),
    make_view("b2", Role.BOTH),
]


@pytest.mark.parametrize(
    ("own", "known"),
    [
        ("p1", {"d1", "d2", "b1", "b2"}),
        ("d1", {"p1", "p2", "b1", "b2"}),
        ("b1", {"p1", "p2", "d1", "d2", "b2"}),
    ],
)
def test_workers_of_complementary_roles_meet(own, known):
    view = next(each for each in FLEET if each.worker_id == own)
    assert {peer.worker_id for peer in peers_to_connect(view, FLEET)} == known


def test_workers_of_another_kind_and_an_older_self_are_not_met():
    own = make_view("d", Role.DECODE, number=2)
    others = [
        make_view("p1", Role.PREFILL, compat_hash="other"),
        make_view("p2", Role.PREFILL, model="other"),
        make_view("p3", Role.PREFILL, release=RELEASE + WINDOW + 1),
        make_view("d", Role.BOTH, number=1),
    ]
    assert peers_to_connect(own, others) == ()


def test_workers_of_a_large_fleet_connect_to_bounded_peers():
    decodes = [make_view(f"d{number}", Role.DECODE) for number in range(3 * MAX_LINKS)]
    met = [peers_to_connect(make_view(f"p{number}", Role.PREFILL), decodes) for number in range(20)]
    assert {len(peers) for peers in met} == {MAX_LINKS}
    assert len({peer.worker_id for peers in met for peer in peers}) == len(decodes)


class ScriptedRegistry:
    """Answers with one list of workers after the other; None is Redis away."""

    def __init__(self, *answers) -> None:
        self.answers = [*answers]

    async def snapshot(self, missing=()) -> FleetSnapshot:
        records = self.answers.pop(0)
        if records is None:
            raise RedisUnavailableError("away")
        return FleetSnapshot(epoch="e", workers=tuple(records), malformed=0)


async def test_engine_is_notified_only_of_changed_peers():
    first, second = make_record("p1", Role.PREFILL), make_record("p2", Role.PREFILL)
    orders: list[MeetPeers] = []

    async def order(message: MeetPeers) -> None:
        orders.append(message)

    registry = ScriptedRegistry([], [first], [first], None, [first, second])
    own = make_view("d", Role.DECODE)
    peer_announcements = PeerAnnouncements(fleet=registry, own=lambda: own, order=order)
    for _ in range(5):
        await peer_announcements.introduce()
    assert [{peer.worker_id for peer in message.peers} for message in orders] == [{"p1"}, {"p1", "p2"}]


async def test_fleet_change_sends_peers_immediately(monkeypatch):
    monkeypatch.setattr("tandem_services.worker.peers.WITHIN_S", 0.0)
    reported = asyncio.Event()

    async def order(_message: MeetPeers) -> None:
        reported.set()

    own = make_view("d", Role.DECODE)
    registry = ScriptedRegistry([], [make_record("p1", Role.PREFILL)])
    peer_announcements = PeerAnnouncements(fleet=registry, own=lambda: own, order=order)
    task = asyncio.create_task(peer_announcements.run())
    await asyncio.sleep(0)
    peer_announcements.fleet_changed()
    async with asyncio.timeout(60.0):
        await reported.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_release_of_a_peer_is_named_to_the_engine():
    (peer,) = peers_to_connect(make_view("d", Role.DECODE), [make_view("p", Role.PREFILL, release=RELEASE + 1)])
    assert peer.release == RELEASE + 1
