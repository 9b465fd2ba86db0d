"""Real NIXL on CPU memory: pages move, losses are reported, nothing hangs."""

import select
import sys
import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.nixl import loopback
from tandem_engine.disaggregation.transport import DigestOrder, Digests, PushDone, PushFailed
from tandem_engine.forward.kv_progress import KvProgress
from tandem_testing.disagg_nixl import TIMEOUT_S, Node, make_push, nixl_node, remote_receiver
from tandem_testing.ended_step import over


@pytest.fixture(scope="module")
def pair():
    with nixl_node("p", fill=1) as sender, nixl_node("d") as receiver:
        receiver.transport.expect(1)
        sender.transport.connect(receiver.transport.hello())
        yield sender, receiver


@pytest.fixture
def sender(pair) -> Node:
    pair[0].events.clear()
    return pair[0]


@pytest.fixture
def receiver(pair) -> Node:
    pair[1].events.clear()
    pair[1].pool.data.zero_()
    return pair[1]


def paint(node: Node, *pages: int) -> None:
    for page in pages:
        node.pool.data[page].fill_(page)


def page_ids(*pages: int) -> tuple[PageId, ...]:
    return tuple(PageId(page) for page in pages)


def same(here: Node, page: int, there: Node, other: int) -> bool:
    return torch.equal(here.pool.page_view(PageId(page)), there.pool.page_view(PageId(other)))


def test_pages_arrive_in_granted_places_only(sender, receiver):
    paint(sender, 3, 4, 9)
    sender.transport.push(make_push(receiver.name, (3, 4, 9), (20, 21, 11)))
    sender.wait_for(PushDone)
    assert same(sender, 3, receiver, 20)
    assert same(sender, 4, receiver, 21)
    assert same(sender, 9, receiver, 11)
    assert {*receiver.pool.data.flatten(1).any(1).nonzero().flatten().tolist()} == {11, 20, 21}


def test_completed_write_has_arrived(sender, receiver):  # [record-after-writes]
    """The receiver is not notified: the handoff record relies on this alone."""
    sender.pool.data[1:33] = torch.randn(32, *sender.pool.data.shape[1:])
    for turn in range(20):
        receiver.pool.data[33:65].zero_()
        sender.transport.push(make_push(receiver.name, (*range(1, 33),), (*range(33, 65),), first=turn))
        sender.wait_for(PushDone, turn + 1)
        assert torch.equal(sender.pool.data[1:33], receiver.pool.data[33:65])


def test_both_sides_compute_the_same_digests(sender, receiver):
    paint(sender, 1, 2)
    sender.transport.push(make_push(receiver.name, (1, 2), (8, 4)))
    (done,) = sender.wait_for(PushDone)
    pages = (PageId(8), PageId(4))
    receiver.transport.digest(DigestOrder(room="room", generation=1, pages=pages, kind=DigestKind.SAMPLED, tail=0))
    (there,) = receiver.wait_for(Digests)
    assert there.digests == done.digests
    assert done.digests == PageDigester(sender.pool).begin(page_ids(1, 2), room="room", generation=1, first=0).take()


def test_many_pushes_at_once_all_end(sender, receiver):
    for i in range(50):
        sender.transport.push(make_push(receiver.name, (1 + i,), (64 - i,), first=i))
    assert {event.key.first for event in sender.wait_for(PushDone, 50)} == {*range(50)}


def test_transport_descriptor_is_readable_only_with_events(sender, receiver):
    sender.wait_for(PushDone, 0)
    assert select.select([sender.transport.fileno()], [], [], 0)[0] == []
    sender.transport.push(make_push(receiver.name, (1,), (1,)))
    assert select.select([sender.transport.fileno()], [], [], TIMEOUT_S)[0] != []
    sender.wait_for(PushDone)
    assert select.select([sender.transport.fileno()], [], [], 0)[0] == []


def test_greeting_a_peer_twice_changes_nothing(sender, receiver):  # nixl 2109
    sender.transport.connect(receiver.transport.hello())
    sender.transport.push(make_push(receiver.name, (1,), (1,)))
    sender.wait_for(PushDone)


def test_push_is_not_started_after_its_grant_expired(sender, receiver):  # [grant-expiry]
    paint(sender, 1)
    sender.transport.push(make_push(receiver.name, (1,), (1,), start_before=0.0))
    (failed,) = sender.wait_for(PushFailed)
    assert (failed.reason, failed.peer_lost) == ("the grant expired", False)
    assert not receiver.pool.data.any()


@pytest.mark.parametrize("page", [0, 65])
def test_page_outside_the_peers_pool_is_never_written(sender, receiver, page):
    sender.transport.push(make_push(receiver.name, (1,), (page,)))
    (failed,) = sender.wait_for(PushFailed)
    assert f"page {page} was granted" in failed.reason
    assert not failed.peer_lost


def test_push_to_unconnected_peer_fails(sender):
    sender.transport.push(make_push("x@1", (1,), (1,)))
    (failed,) = sender.wait_for(PushFailed)
    assert failed.peer_lost


@pytest.mark.parametrize(
    "changed",
    [{"nixl_metadata": b"rubbish"}, {"nixl_metadata": b""}, {"page_bytes": 1}, {"device": "TAPE"}],
    ids=lambda changed: next(iter(changed)),
)
def test_unusable_hello_leaves_peer_unconnected(sender, receiver, changed):
    with nixl_node("other") as other:
        sender.transport.connect(msgspec.structs.replace(other.transport.hello(), **changed))
        sender.transport.push(make_push(other.name, (1,), (1,)))
        (failed,) = sender.wait_for(PushFailed)
        assert "not connected" in failed.reason
        sender.transport.push(make_push(receiver.name, (1,), (1,)))
        sender.wait_for(PushDone)


def test_metadata_of_another_agent_is_refused(sender, receiver):
    with nixl_node("victim") as victim, nixl_node("impostor") as impostor:
        stolen = msgspec.structs.replace(
            impostor.transport.hello(), nixl_metadata=victim.transport.hello().nixl_metadata
        )
        sender.transport.connect(stolen)
        sender.transport.push(make_push(impostor.name, (1,), (1,)))
        (failed,) = sender.wait_for(PushFailed)
        assert "not connected" in failed.reason


def test_forgotten_peer_is_unconnected_until_next_hello():  # [dead-peer-released]
    with nixl_node("p") as sender, nixl_node("d") as receiver:
        receiver.transport.expect(1)
        sender.transport.connect(receiver.transport.hello())
        sender.transport.push(make_push(receiver.name, (1,), (1,)))
        sender.wait_for(PushDone)
        sender.transport.forget(receiver.name)
        sender.transport.push(make_push(receiver.name, (1,), (1,), first=1))
        sender.wait_for(PushFailed)
        sender.transport.connect(receiver.transport.hello())
        sender.transport.push(make_push(receiver.name, (1,), (1,), first=2))
        sender.wait_for(PushDone, 2)


def test_restarted_peer_is_another_peer(sender):
    for number in (1, 2):
        with nixl_node("restarts", number) as receiver:
            receiver.transport.expect(1)
            sender.transport.connect(receiver.transport.hello())
            sender.transport.push(make_push(f"restarts@{number}", (1,), (1,), first=number))
            sender.wait_for(PushDone, number)
        sender.transport.forget(f"restarts@{number}")


def test_pushing_to_a_killed_process_fails_instead_of_hanging(sender, receiver):
    with remote_receiver("doomed") as doomed:
        sender.transport.connect(doomed.hello)
        sender.transport.push(make_push("doomed@1", (1,), (1,)))
        sender.wait_for(PushDone)
        doomed.kill()
        sender.transport.push(make_push("doomed@1", (1,), (1,), first=1))
        (failed,) = sender.wait_for(PushFailed)
        assert failed.peer_lost
    sender.transport.push(make_push(receiver.name, (1,), (1,), first=2))
    sender.wait_for(PushDone, 2)


def test_closing_with_a_write_under_way_ends_and_is_idempotent():
    with nixl_node("p") as sender, nixl_node("d") as receiver:
        sender.transport.connect(receiver.transport.hello())
        sender.transport.push(make_push(receiver.name, (1,), (1,)))
        sender.transport.close()
        sender.transport.close()
        receiver.transport.close()


@pytest.mark.parametrize(
    "absurd",
    [
        {"pool_address": -5},
        {"pool_address": 0},
        {"pool_address": 2**64 - 1},
        {"device_id": -1},
        {"device_id": 2**63},
        {"num_pages": 2**62},
        {"num_pages": -4},
    ],
    ids=lambda absurd: "-".join(map(str, *absurd.items())),
)
def test_peer_with_invalid_pool_address_is_not_connected(absurd):  # [wire-refused]
    with nixl_node("p2") as sender, nixl_node("d2") as receiver:
        sender.transport.connect(msgspec.structs.replace(receiver.transport.hello(), **absurd))
        sender.transport.push(make_push(receiver.name, (1,), (1,)))
        (failed,) = sender.wait_for(PushFailed)
        assert failed.peer_lost


# Pushes that follow a step


def test_push_transfers_each_layer_once_written(sender, receiver):  # [settled-only-sent]
    progress = KvProgress(MonotonicClock())
    sender.pool.data[3:5].zero_()
    sender.transport.push(make_push(receiver.name, (3, 4), (20, 11), room="layers", progress=progress))
    sender.pool.data[3:5, 0] = 5
    progress.wrote(0)
    wait_until(lambda: bool((receiver.pool.data[[20, 11], 0] == 5).all()))
    assert not receiver.pool.data[[20, 11], 1].any()
    assert sender.wait_for(PushDone, 0) == []
    sender.pool.data[3:5, 1] = 6
    progress.wrote(1)
    (done,) = sender.wait_for(PushDone)
    assert same(sender, 3, receiver, 20)
    assert same(sender, 4, receiver, 11)
    assert done.digests == PageDigester(sender.pool).begin(page_ids(3, 4), room="layers", generation=1, first=0).take()


def test_step_end_pushes_remaining_layers(sender, receiver):
    progress = KvProgress(MonotonicClock())
    sender.transport.push(make_push(receiver.name, (3,), (20,), progress=progress, least_layers=2))
    progress.ended(over())
    sender.wait_for(PushDone)
    assert same(sender, 3, receiver, 20)


def test_push_fails_with_its_step_alone(sender, receiver):
    progress = KvProgress(MonotonicClock())
    sender.transport.push(make_push(receiver.name, (3,), (20,), progress=progress))
    progress.wrote(0)
    progress.ended(over(ValueError("no")))
    (failed,) = sender.wait_for(PushFailed)
    assert not failed.peer_lost
    sender.transport.push(make_push(receiver.name, (3,), (20,), first=1))
    (done,) = sender.wait_for(PushDone)
    assert done.key.first == 1


def test_push_awaiting_its_step_fails_at_grant_expiry(sender, receiver):  # [grant-expiry]
    start_before = MonotonicClock().now() + 0.05
    progress = KvProgress(MonotonicClock())
    sender.transport.push(make_push(receiver.name, (3,), (20,), progress=progress, start_before=start_before))
    (failed,) = sender.wait_for(PushFailed)
    assert failed.reason == "the grant expired"
    assert not receiver.pool.data.any()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_loopback_moves_a_page_and_prints_its_time(capsys):
    assert loopback.main() == 0
    assert capsys.readouterr().out.startswith("NIXL moved 64 KiB between two agents in ")


def test_loopback_without_nixl_names_the_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    assert loopback.main() == 1
    assert "pip install nixl" in capsys.readouterr().err
