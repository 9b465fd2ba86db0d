"""Whatever happens in whatever order, a page that a writer may still write to is never given to another request."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.base import RoomKey, room_key
from tandem_engine.disaggregation.holds import HoldState, HoldTable
from tandem_testing.disagg_network import make_peer
from tandem_testing.long_tests import examples
from tandem_testing.scheduler_builders import ManualClock

NUM_PAGES = 12
WRITERS = [make_peer("p"), make_peer("q")]


class Holds(RuleBasedStateMachine):
    """`writable` is the truth about the fabric: pages each writer may write to until it acks or dies."""

    rooms = Bundle("rooms")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.free = {PageId(page) for page in range(1, NUM_PAGES + 1)}
        self.holds = HoldTable(clock=self.clock, give_back=self.take_back, drain_timeout=5.0)
        self.owned: dict[RoomKey, tuple[PageId, ...]] = {}
        """Pages of requests: under transfer, or committed and in use."""
        self.writable: dict[RoomKey, tuple[str, frozenset[PageId]]] = {}
        self.generation = 0

    def take_back(self, pages: tuple[PageId, ...]) -> None:
        for page in pages:
            assert page not in self.free, f"page {page} given back twice"
            self.free.add(page)

    @precondition(lambda self: self.free)
    @rule(target=rooms, writer=st.sampled_from(WRITERS), count=st.integers(1, 4))
    def grant(self, writer, count):
        pages = tuple(sorted(self.free)[:count])
        self.free -= {*pages}
        self.generation += 1
        key = room_key("room", self.generation)
        self.holds.grant(key, writer=writer, pages=pages, valid_s=8.0)
        self.owned[key] = pages
        self.writable[key] = (writer.incarnation, frozenset(pages))
        return key

    @rule(key=rooms, writer=st.sampled_from(WRITERS), pages=st.integers(-1, 5))
    def write(self, key, writer, pages):
        self.holds.wrote(key, writer=writer.incarnation, pages=pages)

    @rule(key=rooms, writer=st.sampled_from(WRITERS))
    def renew(self, key, writer):
        """Only a live transfer's own writer puts its deadline off."""
        hold = self.holds.get(key)
        live = hold is not None and not hold.state.owns_pages and hold.writer.incarnation == writer.incarnation
        before = None if hold is None else hold.deadline
        assert self.holds.renew(key, writer=writer.incarnation, valid_s=8.0) == live
        assert hold is None or hold.deadline == (self.clock.time + 8.0 if live else before)

    @rule(key=rooms)
    def commit_when_complete(self, key):
        hold = self.holds.get(key)
        if hold is not None and hold.complete and not hold.state.owns_pages:
            self.holds.commit(key)
            # Everything is written, so the writer has nothing left to write.
            del self.writable[key]

    @rule(key=rooms)
    def end_early(self, key):
        hold = self.holds.get(key)
        if hold is not None and not hold.state.owns_pages:
            self.holds.drain(key, self.owned.pop(key))

    @rule(key=rooms, writer=st.sampled_from(WRITERS))
    def ack(self, key, writer):
        """A writer acks what it was asked about: it has no push outstanding in the room."""
        hold = self.holds.get(key)
        asked = hold is not None and hold.state.owns_pages
        if asked and self.writable.get(key, ("",))[0] == writer.incarnation:
            del self.writable[key]
        assert self.holds.acked(key, writer=writer.incarnation) == (
            asked and hold.writer.incarnation == writer.incarnation
        )

    @rule(writer=st.sampled_from(WRITERS))
    def writer_is_fenced(self, writer):
        """The stage ends its live transfers first, as `peer_gone` does. It may be stopped in the middle of a write."""
        for key in [key for key, (name, _) in self.writable.items() if name == writer.incarnation]:
            self.end_early(key)
        self.holds.fence(writer.incarnation)

    @rule(writer=st.sampled_from(WRITERS))
    def writer_ends(self, writer):
        self.writer_is_fenced(writer)
        for key in [key for key, (name, _) in self.writable.items() if name == writer.incarnation]:
            del self.writable[key]
        self.holds.ended(writer.incarnation)

    @rule(seconds=st.sampled_from([1.0, 5.0, 8.0]))
    def time_passes(self, seconds):
        self.clock.time += seconds
        for hold in self.holds.overdue():
            if hold.state is HoldState.FENCED:
                self.writer_ends(hold.writer)
            elif hold.state.owns_pages:
                self.holds.quarantine(hold)
            else:
                self.end_early(hold.key)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def committed_request_ends(self, data):
        done = [key for key in self.owned if key not in self.holds]
        if done:
            self.take_back(self.owned.pop(data.draw(st.sampled_from(done))))

    @invariant()
    def no_writable_page_is_free(self):  # [late-write]
        for _, pages in self.writable.values():
            assert not pages & self.free

    @invariant()
    def every_page_has_one_owner(self):
        held = [*self.holds.held_pages()]
        owned = [page for pages in self.owned.values() for page in pages]
        assert sorted([*self.free, *held, *owned]) == [*range(1, NUM_PAGES + 1)]


TestHolds = Holds.TestCase
TestHolds.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
