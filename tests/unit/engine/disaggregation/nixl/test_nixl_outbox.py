"""Events on their way to the scheduler thread."""

import select

import pytest

from tandem_engine.disaggregation.nixl.queues import Outbox
from tandem_engine.disaggregation.transport import Digests


@pytest.fixture
def outbox():
    outbox = Outbox()
    yield outbox
    outbox.close()


def event(generation: int) -> Digests:
    return Digests(room="room", generation=generation, digests=())


def readable(outbox: Outbox) -> bool:
    return bool(select.select([outbox.fileno()], [], [], 0)[0])


def test_events_come_out_in_order_and_once(outbox):
    for generation in range(3):
        outbox.put(event(generation))
    assert [event.generation for event in outbox.take()] == [0, 1, 2]
    assert outbox.take() == []


def test_descriptor_is_readable_exactly_while_events_wait(outbox):
    assert not readable(outbox)
    outbox.put(event(0))
    outbox.put(event(1))
    assert readable(outbox)
    outbox.take()
    assert not readable(outbox)
    outbox.put(event(2))
    assert readable(outbox)
