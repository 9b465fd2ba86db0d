"""States in grants, pushes, proofs and holds, and messages that are what they were where there are none."""

from dataclasses import replace

import msgspec
import pytest
import torch

from tandem_engine.base.names import DigestKind, PageId, ReqPoolIdx, RequestId
from tandem_engine.disaggregation.base import room_key
from tandem_engine.disaggregation.digest import PageDigester, unproved
from tandem_engine.disaggregation.grants import Grant, PeerClocks
from tandem_engine.disaggregation.holds import HoldTable
from tandem_engine.disaggregation.nixl.transport import group_pool
from tandem_engine.disaggregation.notifications import digests_of, problem_with
from tandem_engine.disaggregation.outgoing_transfer import SendRoom
from tandem_engine.disaggregation.transport import DigestOrder, Push, PushKey
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.memory.state_pool import StatePool, StateSpec
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.messages.transfer import (
    STATES,
    GroupDigests,
    GroupGrant,
    GroupPool,
    HandoffRecord,
    Hello,
    RankPool,
    WriteGrant,
)
from tandem_engine.scheduler.request import Request
from tandem_testing.disagg_network import make_peer
from tandem_testing.fake_transport import FakeFabric
from tandem_testing.rank_fabric import ranked_node
from tandem_testing.scheduler_builders import ManualClock

WRITER, RECEIVER = make_peer("p"), make_peer("d")
KEY = room_key("room", 1)
ROW = ReqPoolIdx(3)
SPEC = StateSpec(layers=2, history=3, channels=10, heads=2, key_size=4, value_size=3, dtype=torch.bfloat16)
STATE = (GroupGrant(group=STATES, slots=(9,)),)
PROOF = (GroupDigests(group=STATES, digests=(77,)),)

HELLO = Hello(
    sender=RECEIVER,
    nixl_metadata=b"",
    pool_address=64,
    page_bytes=64,
    num_pages=9,
    heads=1,
    device="DRAM",
    device_id=0,
    ranks=(RankPool(nixl_metadata=b"", pool_address=1, device_id=0, first_head=0),),
)
GRANT = WriteGrant(
    room="room",
    generation=1,
    sender=RECEIVER,
    writer=WRITER.incarnation,
    first_token=0,
    pages=(4, 5, 6),
    granted_at=0.0,
    valid_s=8.0,
    digest=DigestKind.SAMPLED,
)
RECORD = HandoffRecord(
    room="room",
    generation=1,
    sender=WRITER,
    first_token=0,
    pages=3,
    digests=(1, 2, 3),
    output_ids=(5,),
    logprobs=None,
    cached_tokens=0,
)


def request() -> Request:
    """Of ten tokens on three pages of four, all computed."""
    pages = [PageId(page) for page in (1, 2, 3)]
    kv = RequestKv(row=ROW, space=BASE_SPACE, page_size=4, pages=pages, committed_len=10)
    sampling = SamplingParams(max_tokens=4)
    return Request(rid=RequestId("r"), origin_input_ids=tuple(range(1, 11)), sampling=sampling, kv=kv)


def granted(groups: tuple[GroupGrant, ...] = STATE) -> Grant:
    return Grant.received(msgspec.structs.replace(GRANT, groups=groups), ManualClock(), PeerClocks())


def make_room(*, kept: bool = True) -> SendRoom:
    room = SendRoom(key=KEY, req=request(), peer=RECEIVER, total=10, grant=granted())
    room.keep_until = 5.0 if kept else None
    return room


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (HELLO, set(Hello.__struct_fields__)),
        (HELLO.ranks[0], set(RankPool.__struct_fields__)),
        (GRANT, set(WriteGrant.__struct_fields__)),
        (RECORD, set(HandoffRecord.__struct_fields__)),
    ],
)
def test_messages_without_states_do_not_name_groups(message, fields):
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert sent.keys() - {"type"} == fields - {"groups"}


@pytest.mark.parametrize(
    ("message", "groups"),
    [
        (HELLO, (GroupPool(address=1, slot_bytes=256, num_slots=3, layout="x"),)),
        (GRANT, STATE),
        (RECORD, PROOF),
    ],
)
def test_messages_with_states_keep_them_on_the_wire(message, groups):
    sent = msgspec.structs.replace(message, groups=groups)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(message)) == sent


@pytest.mark.parametrize(
    "groups",
    [(GroupGrant(group=16, slots=(9,)),), (GroupGrant(group=STATES, slots=()),), (GroupGrant(group=0, slots=(9,)),)],
)
def test_group_that_cannot_be_is_no_message(groups):
    sent = msgspec.msgpack.encode(msgspec.structs.replace(GRANT, groups=groups))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(sent, type=WriteGrant)


@pytest.mark.parametrize(
    ("groups", "stateful", "problem"),
    [
        (STATE, True, None),
        ((), False, None),
        ((), True, "grant for groups [] next to pages"),
        (STATE, False, "grant for groups [1] next to pages"),
        ((GroupGrant(group=2, slots=(9,)),), True, "grant for groups [2] next to pages"),
        (STATE * 2, True, "grant for groups [1, 1] next to pages"),
    ],
)
def test_grant_needs_exactly_one_state_slot_for_a_stateful_model(groups, stateful, problem):
    found = granted(groups).problem(tokens=10, page_size=4, peer=RECEIVER.incarnation, adapter=b"", stateful=stateful)
    assert found == problem


@pytest.mark.parametrize(
    ("groups", "stateful", "sound"),
    [
        (PROOF, True, True),
        ((), True, False),
        (PROOF, False, False),
        ((GroupDigests(group=STATES, digests=()),), True, False),
    ],
)
def test_record_proves_the_state_that_was_granted(groups, stateful, sound):
    record = msgspec.structs.replace(RECORD, groups=groups)
    problem = problem_with(record, request(), granted=3, first_token=0, vocab_size=9, stateful=stateful)
    assert (problem is None) is sound
    assert problem is None or "digests of further groups" in problem


def test_digests_of_a_record_end_with_that_of_the_state():
    assert digests_of(RECORD) == (1, 2, 3)
    assert digests_of(msgspec.structs.replace(RECORD, groups=PROOF)) == (1, 2, 3, 77)


def test_state_goes_once_its_request_is_kept():
    room = make_room(kept=False)
    assert room.state_push() is None
    room.keep_until = 5.0
    push = room.state_push()
    assert push is not None
    assert (push.source, push.target, push.key.group) == ((PageId(ROW),), (PageId(9),), STATES)
    room.started(push)
    assert room.state_push() is None


def test_room_is_complete_with_its_state():
    room = make_room()
    pages = room.next_push(8)
    assert pages is not None
    room.started(pages)
    assert room.done(pages.key, (1, 2, 3))
    assert not room.complete
    push = room.state_push()
    assert push is not None
    room.started(push)
    assert not room.complete
    assert room.done(push.key, (77,))
    assert room.complete
    assert (room.all_digests(), room.state_digests, room.written) == ((1, 2, 3), (77,), 3)


def test_state_push_from_replaced_row_is_invalid():
    room = make_room()
    push = room.state_push()
    assert push is not None
    room.started(push)
    room.req.kv = replace(room.req.held_kv, row=ReqPoolIdx(4))
    assert not room.done(push.key, (77,))


def test_state_that_did_not_get_through_fails_its_room():
    room = make_room()
    push = room.state_push()
    assert push is not None
    room.started(push)
    assert not room.failed(push.key)


def test_row_of_a_hold_is_free_with_its_pages():  # [late-write]
    pages, rows = [], []
    table = HoldTable(clock=ManualClock(), give_back=pages.extend, give_back_row=rows.append, drain_timeout=5.0)
    hold = table.grant(KEY, writer=WRITER, pages=(PageId(4),), valid_s=8.0, row=ROW)
    assert hold.states == (PageId(ROW),)
    assert [*table.held_rows()] == []  # the request's
    table.drain(KEY, hold.pages)
    table.quarantine(hold)
    assert ([*table.held_rows()], rows) == ([ROW], [])
    assert table.acked(KEY, writer=WRITER.incarnation)
    assert ([*table.held_rows()], rows, pages) == ([], [ROW], [PageId(4)])


def test_committed_row_stays_with_its_request():
    rows = []
    table = HoldTable(clock=ManualClock(), give_back=[].extend, give_back_row=rows.append, drain_timeout=5.0)
    table.grant(KEY, writer=WRITER, pages=(PageId(4),), valid_s=8.0, row=ROW)
    table.wrote(KEY, writer=WRITER.incarnation, pages=1)
    table.commit(KEY)
    assert ([*table.held_rows()], rows) == ([], [])


@pytest.fixture
def states() -> StatePool:
    pool = StatePool(SPEC, rows=4, device="cpu")
    pool.matrices.normal_()
    pool.inputs.normal_()
    return pool


def digester(states: StatePool) -> PageDigester:
    pool = KvPool(num_pages=5, num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype=torch.float32, device="cpu")
    return PageDigester(pool, states=PageDigester(states))


def order(*slots: int) -> DigestOrder:
    states = tuple(PageId(slot) for slot in slots)
    return DigestOrder(room="room", generation=1, pages=(PageId(2),), kind=DigestKind.SAMPLED, tail=0, states=states)


def test_both_sides_compute_equal_digest_of_a_state(states):
    here = digester(states)
    key = PushKey(room="room", generation=1, first=0, count=1, group=STATES)
    sent = here.begin_sent(Push(key=key, peer="d@1", source=(PageId(2),), target=(PageId(4),))).take()
    states.copy([(2, 4)])
    assert here.begin_order(order(4)).take()[1:] == sent
    assert here.begin_order(order(3)).take()[1:] != sent


def test_one_bit_of_any_layer_changes_the_proof_of_a_state(states):
    here = digester(states)
    before = here.begin_order(order(1)).take()
    for part in (states.matrices, states.inputs):
        for layer in range(SPEC.layers):
            kept = part[1, layer].clone()
            part[1, layer].view(-1)[-1] += 1
            assert here.begin_order(order(1)).take() != before
            part[1, layer].copy_(kept)
    assert here.begin_order(order(1)).take() == before


def test_state_never_has_the_digest_of_a_page(states):
    """Equal bytes at the same index of the same attempt."""
    bytes_of = PageDigester(states)
    where = {"room": "room", "generation": 1, "first": 0, "kind": DigestKind.FULL}
    page, state = (bytes_of.begin([PageId(1)], **where, group=group).take() for group in (0, STATES))
    assert page != state


def test_order_that_failed_proves_no_state():
    assert unproved(order(1)).digests == (0, 0)


@pytest.mark.parametrize(
    ("ranks", "change", "reason"),
    [
        (1, {"dtype": torch.float32}, "its states are ['2x2x4x3 float32 and 2x3x10 float32'], ours "),
        (1, {"layers": 3}, "its states are ['3x2x4x3 float32 and 3x3x10 bfloat16'], ours "),
        (1, None, "its states are [], ours "),
        (2, {}, "its states are divided among 2 ranks, ours among 1"),
    ],
)
def test_peer_with_other_states_is_refused_by_name(states, ranks, change, reason):
    fabric = FakeFabric()
    here, there = (ranked_node(fabric, name, size, kv_heads=4) for name, size in (("p", 1), ("d", ranks)))
    (sender,) = here.ranks
    sender._hello = msgspec.structs.replace(sender.hello(), groups=(group_pool(states),))
    hello = there.ranks[0].hello()
    if change is not None:
        pool = StatePool(replace(SPEC, **change), rows=1, device="cpu")
        hello = msgspec.structs.replace(hello, groups=(group_pool(pool),))
    sender.connect(hello)
    sender.push(
        Push(
            key=PushKey(room="room", generation=1, first=0, count=1),
            peer=there.name,
            source=(PageId(1),),
            target=(PageId(1),),
        )
    )
    (failed,) = sender.poll()
    assert failed.reason.startswith(reason)
