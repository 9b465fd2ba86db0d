"""Waits for a live peer last; waits for a silent one end on time."""

import msgspec
import pytest

from tandem_engine.base.errors import WireError
from tandem_engine.base.names import RequestId
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.base import room_key
from tandem_engine.disaggregation.decode import MAX_REPEATS
from tandem_engine.disaggregation.leases import Open, Pulse, Standstill
from tandem_engine.disaggregation.prefill import Portions
from tandem_engine.messages.codec import Codec
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import (
    MAX_OPEN_ROOMS,
    GrantsRenewed,
    HandoffRecord,
    Hello,
    OpenRoom,
    PeerMessage,
    StillOpen,
    TransferAborted,
    WriteGrant,
)
from tandem_testing.disagg_network import PeerNetwork, make_peer
from tandem_testing.disagg_pair import (
    CONFIG,
    DRAIN_TIMEOUT,
    GRANT_TIMEOUT,
    HOLD_TIMEOUT,
    PROMPT,
    make_pair,
)
from tandem_testing.disagg_played import PlayedEnd
from tandem_testing.disagg_script import make_scripted_peer
from tandem_testing.fake_executor import next_token
from tandem_testing.fake_transport import Fate
from tandem_testing.scheduler_builders import VOCAB, ManualClock, make_message

PERIOD = CONFIG.renewal_period
OTHER_PROMPT = tuple(range(20, 30))
PAGES = (4, 9, 2)
"""Granted pages for `PROMPT`."""


class Scene(PlayedEnd):
    """That greets the engine at once, and exchanges keepalives with it."""

    def __init__(self, side: HandoffSide, **engine: object) -> None:
        super().__init__(side, **engine)
        self.other.greet()

    def keepalive(self, *rooms: OpenRoom, sent_at: float = 0.0) -> None:
        """A keepalive of the other end with these rooms."""
        other_side = HandoffSide.SEND if self.side_of_engine is HandoffSide.RECEIVE else HandoffSide.RECEIVE
        self.other.keepalive(other_side, *rooms, sent_at=sent_at)
        self.turn()

    def signs(self) -> list[StillOpen]:
        """Keepalives of the engine under test."""
        return [sign for sign in self.side.link.messages(StillOpen) if not _asks(sign)]

    def questions(self) -> list[StillOpen]:
        """About rooms that it has granted."""
        return [sign for sign in self.side.link.messages(StillOpen) if _asks(sign)]

    def gave_up(self) -> list[str]:
        """Rooms that the engine under test reported as done to the other end."""
        return [abort.room for abort in self.side.link.messages(TransferAborted)]


def _asks(sign: StillOpen) -> bool:
    return sign.side is HandoffSide.RECEIVE and any(room.granted for room in sign.rooms)


def make_receiver(**engine: object) -> Scene:
    return Scene(HandoffSide.RECEIVE, **engine)


def make_sender(**engine: object) -> Scene:
    return Scene(HandoffSide.SEND, **engine)


def crowded_receiver() -> Scene:
    """Room `room-first` is granted, `room-r` waits for its memory."""
    receiver = make_receiver(usable_pages=5)
    receiver.submit("first", OTHER_PROMPT)
    receiver.submit()
    assert [grant.room for grant in receiver.side.link.messages(WriteGrant)] == ["room-first"]
    return receiver


def waiting(rid: str = "r", generation: int = 1) -> OpenRoom:
    return OpenRoom(f"room-{rid}", generation)


def granted(rid: str = "r", generation: int = 1, *, written: int = 0) -> OpenRoom:
    return OpenRoom(f"room-{rid}", generation, granted=True, written=written)


# The receiver


def test_request_awaits_memory_while_writer_sends_keepalives():
    receiver = crowded_receiver()
    for _ in range(10):
        receiver.pass_time(GRANT_TIMEOUT - 1.0)
        receiver.keepalive(granted("first"), waiting())
    assert receiver.side.finish() is None
    receiver.side.engine.scheduler.abort(RequestId("first"))
    receiver.other.ack("room-first")
    receiver.turn()
    assert receiver.side.link.messages(WriteGrant)[-1].room == "room-r"


def test_request_awaiting_memory_fails_lease_after_keepalive():  # [abort-both-ways]
    receiver = crowded_receiver()
    receiver.pass_time(5.0)
    receiver.keepalive(waiting())
    receiver.pass_time(GRANT_TIMEOUT - 0.1)
    assert receiver.side.finish() is None
    receiver.pass_time(0.1)
    assert receiver.side.finish().retryable
    assert "room-r" in receiver.gave_up()


def test_waiting_for_memory_ends_with_the_requests_own_deadline():
    receiver = make_receiver(usable_pages=5)
    receiver.submit("first", OTHER_PROMPT)
    receiver.submit(deadline_s=3 * GRANT_TIMEOUT)
    for _ in range(5):
        receiver.keepalive(granted("first"), waiting())
        receiver.pass_time(GRANT_TIMEOUT * 0.6)
    assert receiver.side.finish().reason is FinishReason.ABORT
    assert receiver.side.finish("first") is None


def test_hold_deadline_is_extended_with_grant_renewal():  # [grant-expiry]
    receiver = make_receiver()
    receiver.submit()
    receiver.pass_time(5.0)
    receiver.keepalive(granted(), sent_at=123.0)
    (answer,) = receiver.other.got(GrantsRenewed)
    assert (answer.sent_at, answer.valid_s, answer.rooms) == (123.0, GRANT_TIMEOUT, (granted(),))
    hold = receiver.side.stage.decode.holds.get(room_key("room-r", 1))
    assert hold.deadline == receiver.side.engine.clock.time + GRANT_TIMEOUT


def test_hold_of_silent_writer_expires_on_time():  # [grant-expiry]
    receiver = make_receiver()
    receiver.submit()
    receiver.pass_time(5.0)
    receiver.keepalive(granted())
    receiver.pass_time(GRANT_TIMEOUT - 0.1)
    assert receiver.side.finish() is None
    receiver.pass_time(0.1)
    assert receiver.side.finish().retryable


def test_undelivered_grant_expires_despite_writer_keepalives():
    receiver = make_receiver()
    receiver.submit()
    for _ in range(8):
        receiver.keepalive(waiting())
        receiver.pass_time(PERIOD)
    assert receiver.side.finish().retryable
    assert receiver.other.got(GrantsRenewed) == []
    assert len(receiver.side.link.messages(WriteGrant)) == 1 + MAX_REPEATS


def test_grant_is_repeated_for_writer_waiting_without_it():  # [lost-message-repeated]
    receiver = make_receiver()
    receiver.submit()
    receiver.keepalive(waiting())
    assert len(receiver.side.link.messages(WriteGrant)) == 1, "it may be on its way"
    receiver.pass_time(PERIOD)
    receiver.keepalive(waiting())
    first, second = receiver.side.link.messages(WriteGrant)
    assert msgspec.structs.replace(first, granted_at=PERIOD) == second
    hold = receiver.side.stage.decode.holds.get(room_key("room-r", 1))
    assert hold.deadline == receiver.side.engine.clock.time + GRANT_TIMEOUT, "put off before the writer is told"


@pytest.mark.parametrize("named", [granted(), waiting("other"), waiting(generation=2)])
def test_grant_is_not_repeated_for_granted_or_other_room(named):
    receiver = make_receiver()
    receiver.submit()
    receiver.pass_time(PERIOD)
    receiver.keepalive(named)
    assert len(receiver.side.link.messages(WriteGrant)) == 1


def test_grant_is_not_repeated_for_keepalive_of_other_peer():
    receiver = make_receiver()
    receiver.submit()
    receiver.pass_time(PERIOD)
    foreign = make_scripted_peer(
        make_peer("q"),
        receiver.side.peer,
        fabric=receiver.fabric,
        network=receiver.network,
        clock=receiver.side.engine.clock,
    )
    foreign.keepalive(HandoffSide.SEND, waiting(), sent_at=0.0)
    receiver.turn()
    assert len(receiver.side.link.messages(WriteGrant)) == 1


def test_verifying_has_a_lease_of_its_own():
    receiver = make_receiver()
    receiver.submit()
    grant = receiver.other.grant()
    receiver.pass_time(GRANT_TIMEOUT - 1.0)
    receiver.other.record(grant, next_token(PROMPT, vocab_size=VOCAB))
    receiver.turn()
    receiver.side.transport.events.clear()  # the digests never end
    receiver.pass_time(GRANT_TIMEOUT - 1.0)
    assert receiver.side.finish() is None
    receiver.pass_time(1.0)
    assert receiver.side.finish().retryable


@pytest.mark.parametrize("named", [granted("x"), granted(generation=2)])
def test_signs_of_life_about_unknown_rooms_are_not_answered(named):  # [late-signal-ignored]
    receiver = make_receiver()
    receiver.submit()
    receiver.keepalive(named)
    receiver.pass_time(GRANT_TIMEOUT)
    assert receiver.side.finish().retryable
    assert receiver.other.got(GrantsRenewed) == []


def test_keepalives_of_closed_room_do_not_delay_quarantine():  # [ack-per-grant] [late-signal-ignored]
    receiver = make_receiver()
    receiver.submit()
    receiver.side.engine.scheduler.abort(RequestId("r"))
    receiver.turn()
    receiver.keepalive(granted())
    receiver.pass_time(DRAIN_TIMEOUT)
    assert receiver.side.stage.quarantined_pages() == 3
    assert receiver.other.got(GrantsRenewed) == []


def test_signs_of_life_of_another_worker_renew_nothing():
    receiver = crowded_receiver()
    foreign = make_scripted_peer(
        make_peer("q"),
        receiver.side.peer,
        fabric=receiver.fabric,
        network=receiver.network,
        clock=receiver.side.engine.clock,
    )
    foreign.keepalive(HandoffSide.SEND, granted("first"), waiting())
    receiver.turn()
    assert foreign.got(GrantsRenewed) == []
    receiver.pass_time(GRANT_TIMEOUT)
    assert receiver.side.finish().retryable
    assert receiver.side.finish("first").retryable


def test_receiver_keepalive_lists_waiting_rooms_per_period():
    receiver = crowded_receiver()
    receiver.pass_time(PERIOD)
    receiver.turn(5)
    assert [(sign.side, sign.rooms) for sign in receiver.signs()] == [(HandoffSide.RECEIVE, (waiting(),))]
    receiver.pass_time(PERIOD)
    assert len(receiver.signs()) == 2


def test_receiver_queries_granted_rooms_until_handoff_record():
    receiver = make_receiver()
    receiver.submit()
    assert receiver.questions() == []
    receiver.pass_time(CONFIG.question_period)
    receiver.turn(5)
    assert [question.rooms for question in receiver.questions()] == [(granted(),)]
    receiver.other.record(receiver.other.grant(), next_token(PROMPT, vocab_size=VOCAB))
    receiver.turn()
    receiver.pass_time(CONFIG.question_period)
    assert len(receiver.questions()) == 1


def test_questions_put_off_nothing():  # [abort-both-ways]
    receiver = make_receiver()
    receiver.submit()
    while receiver.side.engine.clock.time < GRANT_TIMEOUT:
        receiver.pass_time(CONFIG.question_period)
    assert len(receiver.questions()) > 2
    assert receiver.side.finish().retryable


def test_stalled_receiver_stops_renewing_waiting_rooms():
    receiver = crowded_receiver()
    for _ in range(2 * int(CONFIG.stall_timeout / PERIOD)):
        receiver.pass_time(PERIOD)
        receiver.keepalive(granted("first"), waiting())
    assert CONFIG.stall_timeout - PERIOD <= receiver.signs()[-1].sent_at < CONFIG.stall_timeout
    assert receiver.side.finish() is None


def test_receiver_with_progressing_writes_is_not_stalled():
    receiver = crowded_receiver()
    for written in (1, 2, 3):
        for _ in range(int(CONFIG.stall_timeout / PERIOD) - 1):
            receiver.pass_time(PERIOD)
            receiver.keepalive(granted("first", written=written), waiting())
    assert receiver.signs()[-1].sent_at == receiver.side.engine.clock.time > 2 * CONFIG.stall_timeout


def test_receiver_that_computes_has_not_come_to_a_standstill():
    receiver = make_receiver(usable_pages=20, init_new_token_ratio=1.0)
    receiver.side.engine.add(make_message("running", OTHER_PROMPT, max_tokens=60))
    receiver.turn()
    receiver.submit()
    while receiver.side.engine.clock.time < 1.2 * CONFIG.stall_timeout:
        receiver.pass_time(2 * PERIOD)
        receiver.keepalive(waiting())
    assert receiver.side.finish("running") is None
    assert receiver.signs()[-1].sent_at == receiver.side.engine.clock.time


# The sender


def test_sender_keeps_prompt_kv_while_receiver_awaits_memory():
    sender = make_sender()
    sender.submit()
    for _ in range(10):
        sender.pass_time(HOLD_TIMEOUT - 1.0)
        sender.keepalive(waiting())
    sender.other.allow("room-r", PAGES)
    sender.turn(4)
    assert sender.other.tokens_at(PAGES, len(PROMPT)) == [*PROMPT]
    assert len(sender.other.got(HandoffRecord)) == 1
    sender.side.assert_clean()


def test_sender_releases_prompt_kv_of_silent_receiver():
    sender = make_sender()
    sender.submit()
    sender.pass_time(HOLD_TIMEOUT - 1.0)
    sender.keepalive(waiting())
    sender.pass_time(HOLD_TIMEOUT - 0.1)
    assert sender.gave_up() == []
    sender.pass_time(0.1)
    assert sender.gave_up() == ["room-r"]
    sender.side.assert_clean()


@pytest.mark.parametrize("named", [waiting("x"), waiting(generation=2)])
def test_prompt_is_not_kept_for_another_room(named):
    sender = make_sender()
    sender.submit()
    sender.pass_time(HOLD_TIMEOUT - 1.0)
    sender.keepalive(named)
    sender.pass_time(1.0)
    assert sender.gave_up() == ["room-r"]


def test_keepalive_of_other_peer_does_not_extend_prompt_hold():
    sender = make_sender()
    foreign = make_scripted_peer(
        make_peer("q"), sender.side.peer, fabric=sender.fabric, network=sender.network, clock=sender.side.engine.clock
    )
    sender.submit()
    sender.pass_time(HOLD_TIMEOUT - 1.0)
    foreign.keepalive(HandoffSide.RECEIVE, waiting())
    sender.pass_time(1.0)
    assert sender.gave_up() == ["room-r"]


def test_sender_keepalive_lists_open_and_granted_rooms():
    sender = make_sender(max_running_requests=1, chunked_prefill_size=4)
    sender.other.allow("room-r", PAGES)
    sender.turn()
    sender.submit()
    sender.submit("queued", OTHER_PROMPT)
    sender.pass_time(PERIOD)
    (sign,) = sender.signs()
    assert (sign.side, sign.rooms) == (HandoffSide.SEND, (granted(written=2), waiting("queued")))


def slow_sender() -> Scene:
    """Its first push takes very long; the grant was received at 0 and is good for 8 seconds."""
    sender = make_sender()
    sender.fabric.fates = lambda _push: Fate(delay=1000)
    sender.other.allow("room-r", PAGES, valid_s=GRANT_TIMEOUT)
    sender.turn()
    sender.submit()
    return sender


def expiry(sender: Scene) -> float:
    return sender.side.stage.prefill.rooms[room_key("room-r", 1)].grant.expires


@pytest.mark.parametrize(
    ("sent_at", "expires"),
    [(6.0, 14.0), (1.0, 9.0), (-5.0, GRANT_TIMEOUT), (99.0, 15.0), (float("inf"), 15.0), (float("nan"), 8.0)],
    ids=["at once", "late", "too late", "from the future", "infinite", "not a number"],
)
def test_renewed_lease_counts_from_time_of_request(sent_at, expires):  # [grant-expiry]
    sender = slow_sender()
    sender.pass_time(7.0)
    sender.other.renew("room-r", sent_at=sent_at)
    sender.turn()
    assert expiry(sender) == expires


def test_endless_renewal_is_not_believed():
    sender = slow_sender()
    sender.other.renew("room-r", sent_at=0.0, valid_s=float("inf"))
    sender.turn()
    assert expiry(sender) == GRANT_TIMEOUT


def test_no_push_starts_after_grant_expiry():  # [grant-expiry]
    sender = make_sender(chunked_prefill_size=4)
    sender.side.stage.prefill.portions = Portions(push_bytes=64, write_bytes=1 << 20)
    sender.other.allow("room-r", PAGES, valid_s=2.0)
    sender.turn()
    sender.submit()
    sender.pass_time(2.0)
    sender.turn(4)
    assert sender.gave_up() == ["room-r"]
    assert sender.other.tokens_at(PAGES[1:], 6) == [0] * 6


def test_renewals_of_closed_unknown_or_other_rooms_are_ignored():  # [late-signal-ignored]
    sender = slow_sender()
    foreign = make_scripted_peer(
        make_peer("q"), sender.side.peer, fabric=sender.fabric, network=sender.network, clock=sender.side.engine.clock
    )
    foreign.renew("room-r", sent_at=0.0, valid_s=100.0)
    sender.other.renew("room-x", sent_at=0.0, valid_s=100.0)
    sender.other.renew("room-r", sent_at=0.0, valid_s=100.0, generation=2)
    sender.turn()
    assert expiry(sender) == GRANT_TIMEOUT
    sender.pass_time(GRANT_TIMEOUT)
    assert sender.gave_up() == ["room-r"]
    sender.other.renew("room-r", sent_at=GRANT_TIMEOUT)
    sender.turn(2)
    assert dict(sender.side.stage.prefill.rooms) == {}


@pytest.mark.parametrize(("push_bytes", "seconds"), [(64, GRANT_TIMEOUT), (64 << 20, 14.7), (256 << 20, 34.8)])
def test_push_has_the_time_of_its_bytes_while_its_receiver_lives(push_bytes, seconds):
    sender = slow_sender()
    [room] = sender.side.stage.prefill.rooms.values()
    sender.side.stage.prefill.page_bytes = push_bytes // max(key.count for key in room.outstanding)
    sender.other.renew("room-r", sent_at=sender.side.engine.clock.time, valid_s=100.0)
    sender.turn()
    sender.pass_time(seconds - 0.1)
    assert sender.gave_up() == []
    sender.pass_time(0.2)
    assert sender.gave_up() == ["room-r"]
    sender.side.assert_clean()


# Messages


@pytest.fixture
def pulse() -> Pulse:
    link = PeerNetwork().join(make_peer("p"))
    return Pulse(side=HandoffSide.SEND, period=2.0, clock=ManualClock(), peers=link)


def test_pulse_is_due_once_per_period(pulse):
    due = []
    for tenths in range(60):
        pulse.clock.time = tenths / 10
        due += [tenths] * pulse.due()
    assert due == [0, 20, 40]


def test_each_peer_gets_one_message_with_all_its_rooms(pulse):
    pulse.notify(Open(make_peer("de"[number % 2]), waiting(str(number))) for number in range(6))
    rooms = [[room.room for room in sign.rooms] for sign in pulse.peers.messages(StillOpen)]
    assert rooms == [["room-0", "room-2", "room-4"], ["room-1", "room-3", "room-5"]]


def test_no_keepalive_without_open_rooms(pulse):
    pulse.notify(())
    assert pulse.peers.sent == []


def test_messages_name_a_bounded_number_of_rooms(pulse):
    pulse.notify(Open(make_peer("d"), waiting(str(number))) for number in range(MAX_OPEN_ROOMS + 1))
    assert [len(sign.rooms) for sign in pulse.peers.messages(StillOpen)] == [MAX_OPEN_ROOMS, 1]
    codec: Codec[PeerMessage] = Codec(PeerMessage)
    rooms = tuple(waiting(str(number)) for number in range(MAX_OPEN_ROOMS + 1))
    flood = StillOpen(sender=make_peer("p"), side=HandoffSide.SEND, sent_at=0.0, rooms=rooms)
    with pytest.raises(WireError, match="length"):
        codec.decode(codec.encode(flood))


def test_stall_time_counts_from_last_progress_while_waiting():
    clock = ManualClock()
    standstill = Standstill(clock=clock)
    clock.time = 100.0
    assert standstill.seconds(7, waiting=False) == 0.0
    clock.time = 110.0
    assert standstill.seconds(7, waiting=True) == 10.0
    assert standstill.seconds(8, waiting=True) == 0.0
    clock.time = 130.0
    assert standstill.seconds(8, waiting=True) == 20.0


def test_renewal_period_is_quarter_of_shortest_lease():
    assert DisaggConfig(grant_timeout=8.0, hold_timeout=4.0).renewal_period == 1.0


# Both sides


def test_prompt_queued_longer_than_lease_is_handed_off():
    pair = make_pair(prefill={"max_prefill_tokens": 4, "chunked_prefill_size": 4})
    pair.prefill.engine.add(make_message("ahead", range(1, 90), max_tokens=1))
    pair.submit("r", OTHER_PROMPT)
    assert pair.decode.link.messages(WriteGrant) == []
    pair.run(seconds_per_turn=1.0)
    assert pair.prefill.engine.clock.time > 2 * GRANT_TIMEOUT
    assert pair.decode.tokens() == pair.expected()
    pair.assert_clean()


@pytest.mark.parametrize("kinds", [(WriteGrant,), (Hello, WriteGrant)], ids=["grant", "greeting and grant"])
def test_lost_grant_is_resent_and_request_succeeds(kinds):  # [lost-message-repeated]
    pair = make_pair()
    gone: set[type[PeerMessage]] = set()

    def lost(message: PeerMessage) -> bool:
        first = type(message) in kinds and type(message) not in gone
        gone.add(type(message))
        return first

    pair.network.lost = lost
    pair.submit()
    pair.run(seconds_per_turn=0.5)
    assert gone >= set(kinds)
    assert pair.decode.tokens() == pair.expected()
    pair.assert_clean()


def lose_first(pair, kind: type[PeerMessage]) -> list[PeerMessage]:
    """The first message of a kind vanishes; what was lost is in the list."""
    gone: list[PeerMessage] = []

    def lost(message: PeerMessage) -> bool:
        first = isinstance(message, kind) and not gone
        gone.extend([message] * first)
        return first

    pair.network.lost = lost
    return gone


def test_lost_handoff_record_is_resent_without_retry():  # [lost-message-repeated]
    pair = make_pair()
    gone = lose_first(pair, HandoffRecord)
    pair.submit()
    pair.run(seconds_per_turn=CONFIG.question_period / 2)
    assert pair.prefill.link.messages(HandoffRecord) == 2 * gone
    assert pair.decode.engine.clock.time < GRANT_TIMEOUT
    assert pair.decode.tokens() == pair.expected()
    pair.assert_clean()


def test_lost_transfer_abort_is_resent_by_sender():  # [abort-both-ways]
    pair = make_pair()
    gone = lose_first(pair, TransferAborted)
    pair.fabric.fates = lambda _push: Fate(fail=True)
    pair.submit()
    pair.run(seconds_per_turn=CONFIG.question_period / 2)
    assert gone == pair.prefill.link.messages(TransferAborted)[:1]
    assert pair.decode.finish().retryable
    assert pair.decode.engine.clock.time < GRANT_TIMEOUT
    pair.assert_clean()


@pytest.mark.parametrize("named", [granted("unknown"), granted(generation=2)])
def test_query_of_unknown_room_gets_no_reply(named):  # [late-signal-ignored]
    sender = make_sender()
    sender.submit()
    sender.keepalive(named)
    assert sender.other.got(TransferAborted) == []
    assert sender.other.got(HandoffRecord) == []


def test_handoff_succeeds_after_memory_wait_longer_than_lease():
    pair = make_pair(decode={"usable_pages": 15, "init_new_token_ratio": 1.0})
    pair.decode.engine.add(make_message("ahead", OTHER_PROMPT, max_tokens=40))
    pair.decode.step(2)
    pair.submit()
    pair.turn(4)
    assert pair.prefill.stage.inflight() == 1
    assert pair.decode.link.messages(WriteGrant) == []
    pair.run(seconds_per_turn=1.0)
    assert pair.prefill.engine.clock.time > 2 * HOLD_TIMEOUT
    assert pair.decode.tokens() == pair.expected()
    pair.assert_clean()


def test_engines_in_circular_wait_fail_one_request_retryable():
    """The writer is full of the prompt that comes second at the receiver, and the other way round."""
    pair = make_pair(usable_pages=8)
    first, second = tuple(range(1, 25)), tuple(range(30, 54))
    pair.submit_prefill("first", first, max_tokens=4)
    pair.submit_prefill("second", second, max_tokens=4)
    pair.submit_decode("second", second, max_tokens=4)
    pair.submit_decode("first", first, max_tokens=4)
    pair.run(seconds_per_turn=1.0)
    assert CONFIG.stall_timeout < pair.decode.engine.clock.time < CONFIG.stall_timeout + 3 * GRANT_TIMEOUT
    assert pair.decode.finish("first").retryable
    assert pair.decode.tokens("second") == pair.expected("second")
    pair.assert_clean()
