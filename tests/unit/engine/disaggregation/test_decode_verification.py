"""Pages and records that do not verify: none of it reaches attention, the cache or a client."""

import pytest

from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.messages.outputs import TokenLogprob
from tandem_testing.disagg_network import make_peer
from tandem_testing.disagg_pair import PROMPT
from tandem_testing.disagg_played import ROOM, first_token
from tandem_testing.fake_transport import Fate
from tandem_testing.scheduler_builders import VOCAB


def test_corrupt_page_never_reaches_attention_or_the_cache(receiver):  # [verified-pages]
    receiver.fabric.fates = lambda _push: Fate(corrupt=True)
    receiver.transferred()
    receiver.turn(3)
    receiver.assert_failed("1 of 3 pages did not verify")
    assert receiver.side.stage.counters.digest_mismatches == 1
    receiver.drain()
    assert not receiver.is_cached()
    receiver.side.assert_clean()


@pytest.mark.parametrize("place", [{"room": "room-s"}, {"generation": 2}, {"first": 1}])
def test_intact_pages_of_another_room_or_position_fail_digest(receiver, place):  # [page-in-its-place]
    grant = receiver.granted()
    receiver.writer.write(grant)
    there = {"room": ROOM, "generation": 1, "first": 0, **place}
    pages = tuple(PageId(page) for page in (1, 2, 3))
    receiver.writer.record(grant, 1, digests=PageDigester(receiver.writer.pool).begin(pages, **there).take())
    receiver.turn(3)
    receiver.assert_failed("3 of 3 pages did not verify")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"pages": 2}, "reports 2 pages"),
        ({"first_token": 4}, "from token 4"),
        ({"digests": (1, 2)}, "2 digests for 3 pages"),
        ({"output_ids": ()}, "0 tokens handed over"),
        ({"output_ids": (1, 2)}, "2 tokens handed over"),
    ],
)
def test_record_that_contradicts_the_grant_fails_the_transfer(receiver, changed, why):
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1, **changed)
    receiver.turn(2)
    receiver.assert_failed(why)


def test_first_record_of_a_transfer_counts(receiver):
    grant = receiver.granted()
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.writer.record(grant, 1, digests=(1, 2, 3))
    receiver.writer.write(grant)
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


@pytest.mark.parametrize("changed", [{"sender": make_peer("q")}, {"generation": 2}, {"room": "room-x"}])
def test_record_for_another_transfer_is_ignored(receiver, changed):
    grant = receiver.granted()
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1, **changed)
    receiver.turn(3)
    assert receiver.side.finish() is None
    receiver.writer.record(grant, first_token(PROMPT))
    receiver.turn(20)
    receiver.side.engine.assert_expected("r")


@pytest.mark.parametrize(
    ("request_fields", "record_fields", "why"),
    [
        ({}, {"output_ids": (VOCAB,)}, f"token id {VOCAB}"),
        ({}, {"output_ids": (-1,)}, "token id -1"),
        ({}, {"output_ids": (2**63,)}, "token id"),
        ({"logprobs": 1}, {}, "0 logprobs"),
        ({"logprobs": 1}, {"logprobs": (TokenLogprob(logprob=-1.0),) * 2}, "2 logprobs"),
        ({}, {"logprobs": (TokenLogprob(logprob=-1.0),)}, "1 logprobs"),
    ],
)
def test_malformed_handoff_record_fails_the_transfer(receiver, request_fields, record_fields, why):
    grant = receiver.granted(**request_fields)
    receiver.writer.write(grant)
    receiver.writer.record(grant, 1, **record_fields)
    receiver.turn(4)
    receiver.assert_failed(why)
    receiver.drain()
    receiver.side.assert_clean()
