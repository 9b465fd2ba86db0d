"""Pages that a peer may still write to."""

import pytest

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.base import RoomKey, room_key
from tandem_engine.disaggregation.holds import FENCED_AT_MAX_S, HoldState, HoldTable, TransferHold
from tandem_testing.disagg_network import make_peer
from tandem_testing.scheduler_builders import ManualClock

WRITER = make_peer("p")
ROOM = room_key("room", 1)
PAGES = (PageId(3), PageId(5))


class Table:
    """A hold table, its clock and what it has given back."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.free: list[PageId] = []
        self.holds = HoldTable(clock=self.clock, give_back=self.free.extend, drain_timeout=5.0)

    def grant(self, key: RoomKey = ROOM, pages: tuple[PageId, ...] = PAGES) -> TransferHold:
        return self.holds.grant(key, writer=WRITER, pages=pages, valid_s=8.0)

    def drained(self, key: RoomKey = ROOM, pages: tuple[PageId, ...] = PAGES) -> TransferHold:
        hold = self.grant(key, pages)
        self.holds.drain(key, pages)
        return hold


@pytest.fixture
def table() -> Table:
    return Table()


def wrote(table: Table, pages: int, *, writer: str = WRITER.incarnation) -> bool:
    return table.holds.wrote(ROOM, writer=writer, pages=pages)


def test_hold_is_complete_once_all_pages_are_written(table):  # [writes-repeat]
    hold = table.grant()
    assert wrote(table, 1)
    assert not wrote(table, 1)
    assert not hold.complete
    assert wrote(table, 2)
    assert not wrote(table, 1)
    assert hold.complete


def test_committing_leaves_the_pages_to_the_request(table):
    hold = table.grant()
    wrote(table, 2)
    table.holds.commit(ROOM)
    assert hold.state is HoldState.COMMITTED
    assert ROOM not in table.holds
    assert table.free == []


def test_incomplete_hold_cannot_be_committed(table):  # [verified-pages]
    table.grant()
    wrote(table, 1)
    with pytest.raises(AssertionError, match="1 of 2 pages"):
        table.holds.commit(ROOM)


@pytest.mark.parametrize("pages", [3, 0, -1])
def test_writes_outside_the_grant_are_refused(table, pages):
    table.grant()
    assert not wrote(table, pages)


def test_writes_of_another_writer_are_refused(table):
    hold = table.grant()
    assert not wrote(table, 2, writer="p@2")
    assert not hold.complete


def test_drained_pages_stay_held_until_the_writer_acks(table):  # [late-write]
    table.drained()
    assert [*table.holds.held_pages()] == [*PAGES]
    assert table.free == []
    assert table.holds.acked(ROOM, writer=WRITER.incarnation)
    assert table.free == [*PAGES]
    assert ROOM not in table.holds


def test_pages_of_live_transfer_are_not_counted_as_held(table):
    table.grant()
    assert [*table.holds.held_pages()] == []


def test_ack_counts_only_for_its_generation_and_from_its_writer(table):  # [ack-per-grant]
    table.drained()
    assert not table.holds.acked(room_key("room", 2), writer=WRITER.incarnation)
    assert not table.holds.acked(ROOM, writer="p@2")
    assert table.free == []


def test_unexpected_ack_is_ignored(table):  # [late-signal-ignored]
    hold = table.grant()
    assert not table.holds.acked(ROOM, writer=WRITER.incarnation)
    assert hold.state is HoldState.GRANTED
    assert not table.holds.acked(room_key("unknown", 1), writer=WRITER.incarnation)


def test_late_writes_do_not_revive_a_drained_hold(table):  # [late-signal-ignored]
    hold = table.drained()
    assert not wrote(table, 2)
    assert hold.state is HoldState.DRAINING


def test_without_an_ack_pages_are_quarantined_and_not_given_back(table):  # [late-write]
    hold = table.drained()
    assert table.holds.overdue() == []
    table.clock.time = 5.0
    assert table.holds.overdue() == [hold]
    table.holds.quarantine(hold)
    assert hold.state is HoldState.QUARANTINED
    assert table.holds.quarantined_pages() == 2
    assert table.holds.quarantined_for() == (WRITER.incarnation,)
    assert table.free == []


def test_quarantine_ends_with_a_late_ack(table):
    table.holds.quarantine(table.drained())
    assert table.holds.acked(ROOM, writer=WRITER.incarnation)
    assert table.free == [*PAGES]


def test_quarantined_hold_becomes_overdue_again(table):
    hold = table.drained()
    table.clock.time = 5.0
    table.holds.quarantine(hold)
    assert table.holds.overdue() == []
    table.clock.time = 10.0
    assert table.holds.overdue() == [hold]


def test_writer_exit_frees_only_its_own_pages(table):  # [dead-peer-released]
    other = room_key("other", 1)
    table.drained()
    table.holds.quarantine(table.drained(other, (PageId(7),)))
    table.holds.fence(WRITER.incarnation)
    assert table.holds.ended("q@1") == 0
    assert table.holds.ended(WRITER.incarnation) == 2
    assert sorted(table.free) == [3, 5, 7]


def test_fenced_writer_keeps_pages_without_new_request(table):  # [late-write]
    hold = table.drained()
    table.holds.fence("q@1")
    assert hold.state is HoldState.DRAINING
    table.holds.fence(WRITER.incarnation)
    assert hold.state is HoldState.FENCED
    assert (table.free, table.holds.quarantined_pages(), table.holds.quarantined_for()) == ([], 2, ())
    assert [*table.holds.fenced_writers()] == [WRITER]
    table.clock.time = FENCED_AT_MAX_S - 1.0
    table.holds.fence(WRITER.incarnation)
    assert table.holds.overdue() == []
    table.clock.time = FENCED_AT_MAX_S
    assert table.holds.overdue() == [hold], "fencing it again puts nothing off"


def test_ack_of_fenced_writer_frees_its_pages(table):
    table.drained()
    table.holds.fence(WRITER.incarnation)
    assert table.holds.acked(ROOM, writer=WRITER.incarnation)
    assert table.free == [*PAGES]


def test_neither_fencing_nor_an_end_touches_a_transfer_under_way(table):
    """The stage ends it first."""
    hold = table.grant()
    table.holds.fence(WRITER.incarnation)
    assert table.holds.ended(WRITER.incarnation) == 0
    assert table.holds.get(ROOM) is hold
    assert hold.state is HoldState.GRANTED


def test_transfer_is_overdue_when_its_grant_has_run_out(table):
    hold = table.grant()
    table.clock.time = 7.9
    assert table.holds.overdue() == []
    table.clock.time = 8.0
    assert table.holds.overdue() == [hold]


def test_renewed_transfer_is_overdue_later_and_never_earlier(table):
    hold = table.grant()
    table.clock.time = 5.0
    assert table.holds.renew(ROOM, writer=WRITER.incarnation, valid_s=8.0)
    assert hold.deadline == 13.0
    assert table.holds.renew(ROOM, writer=WRITER.incarnation, valid_s=1.0)
    assert hold.deadline == 13.0


def test_only_a_live_transfer_is_renewed_and_only_by_its_writer(table):  # [ack-per-grant] [late-signal-ignored]
    hold = table.grant()
    assert not table.holds.renew(ROOM, writer="p@2", valid_s=100.0)
    assert not table.holds.renew(room_key("room", 2), writer=WRITER.incarnation, valid_s=100.0)
    table.holds.drain(ROOM, PAGES)
    assert not table.holds.renew(ROOM, writer=WRITER.incarnation, valid_s=100.0)
    assert hold.deadline == 5.0


def test_generations_of_a_room_have_separate_holds(table):
    table.grant()
    table.grant(room_key("room", 2), (PageId(9),))
    assert wrote(table, 1)
    assert table.holds.get(room_key("room", 2)).written == 0


def test_room_cannot_be_granted_twice(table):
    table.grant()
    with pytest.raises(AssertionError, match="room/1 has a hold already"):
        table.grant()


def test_only_the_granted_pages_can_be_drained(table):
    table.grant()
    with pytest.raises(AssertionError, match="gave up"):
        table.holds.drain(ROOM, (PageId(3),))


def test_quarantined_holds_expect_no_writes(table):
    table.holds.quarantine(table.drained())
    table.grant(room_key("other", 1))
    assert table.holds.open_transfers() == 1
