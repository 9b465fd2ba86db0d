"""A writer that is stopped in the middle of a NIXL write, fenced, and woken: where it writes then [late-write]."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.base import room_key
from tandem_engine.disaggregation.holds import HoldTable
from tandem_engine.messages.control import PeerEnded
from tandem_services.router.views.fleet_reader import FleetSnapshot
from tandem_services.worker.peers import PeerExits
from tandem_testing.disagg_nixl import Node, RemoteWriter, nixl_node, remote_writer
from tandem_testing.waiting import until

PAGES = 1025
HEAD_DIM = 256
"""Of 128 KiB each: writing them all takes some hundredths of a second."""
ROOM = room_key("room", 1)
PATIENCE_S = 60.0
TRIES = 200


@pytest.fixture
def receiver() -> Iterator[Node]:
    with nixl_node("d", num_pages=PAGES, head_dim=HEAD_DIM) as node:
        node.transport.expect(1)
        yield node


class EmptyRegistry:
    """A registry without workers, that counts how often it is asked."""

    asked = 0

    async def snapshot(self, missing=()) -> FleetSnapshot:
        self.asked += 1
        return FleetSnapshot(epoch="e", workers=(), malformed=0)


def stopped_in_the_middle(writer: RemoteWriter, memory: torch.Tensor) -> None:
    """Stop `writer` when it has written some of the pages, and not all."""
    for number in range(TRIES):
        memory.zero_()
        writer.write_everything(number)
        while not memory[PAGES // 8, 0]:
            pass
        writer.stop()
        if not memory[-1].any():
            return
        writer.wake()
        writer.wait()
    raise AssertionError("it was always through by then")


async def test_pages_of_stopped_writer_are_held_until_it_exits(receiver):
    memory = receiver.pool.data.view(PAGES, -1)
    free: list[PageId] = []

    def give_back(pages: Sequence[PageId]) -> None:
        free.extend(pages)

    holds = HoldTable(clock=MonotonicClock(), give_back=give_back, drain_timeout=5.0)
    granted = tuple(PageId(page) for page in range(1, PAGES))
    registry = EmptyRegistry()

    async def ended(message: PeerEnded) -> None:
        holds.ended(message.incarnation)

    peer_exits = PeerExits(fleet=registry, order=ended, clock=MonotonicClock(), recheck_s=0.05)
    with remote_writer("p", receiver) as writer:
        holds.grant(ROOM, writer=writer.peer, pages=granted, valid_s=8.0)
        stopped_in_the_middle(writer, memory)
        holds.drain(ROOM, granted)
        holds.fence(writer.peer.incarnation)
        (peer,) = peer_exits.unfollowed(holds.fenced_writers())
        following = asyncio.create_task(peer_exits.follow(peer))
        await until(lambda: registry.asked > 5, PATIENCE_S, "its end is looked for again and again")
        assert free == []
        memory.fill_(7)
        writer.wake()
        writer.wait()
        assert (memory[-1] == 1).all(), "woken, it goes on: no grant and no lease is looked at within a write"
        assert free == []
        writer.kill()
        await asyncio.wait_for(following, PATIENCE_S)
    assert sorted(free) == [*granted]
