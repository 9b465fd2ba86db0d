"""Write grants on the writing side."""

import dataclasses

import pytest

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.base import room_key
from tandem_engine.disaggregation.grants import EarlyGrants, Grant, PeerClocks
from tandem_engine.messages.transfer import WriteGrant
from tandem_testing.disagg_network import make_peer
from tandem_testing.scheduler_builders import ManualClock

DECODE = make_peer("d")


def make_grant(
    room: str = "room", *, expires: float = 8.0, pages: tuple[int, ...] = (4, 5), first_token: int = 4
) -> Grant:
    return Grant(
        key=room_key(room, 1),
        receiver=DECODE,
        first_token=first_token,
        pages=tuple(PageId(page) for page in pages),
        expires=expires,
        answer_by=expires,
        digest=DigestKind.SAMPLED,
    )


def problem(grant: Grant, *, tokens: int = 10, adapter: bytes = b"") -> str | None:
    return grant.problem(tokens=tokens, page_size=4, peer=DECODE.incarnation, adapter=adapter)


def received(*, at: float, granted_at: float, clocks: PeerClocks) -> Grant:
    clock = ManualClock()
    clock.time = at
    message = WriteGrant(
        room="room",
        generation=2,
        sender=DECODE,
        writer="p@1",
        first_token=0,
        pages=(1,),
        granted_at=granted_at,
        valid_s=8.0,
        digest=DigestKind.FULL,
    )
    return Grant.received(message, clock, clocks)


@pytest.fixture
def clocks() -> PeerClocks:
    """We asked at 50 and had the answer at 50.1, given when the receiver's clock was at 7000."""
    known = PeerClocks()
    known.learn(DECODE.incarnation, requested_at=50.0, answered_at=7000.0, now=50.1)
    return known


def test_validity_counts_from_when_it_was_sent(clocks):  # [one-clock]
    grant = received(at=100.0, granted_at=7049.0, clocks=clocks)
    assert grant.key == room_key("room", 2)
    assert grant.expires == pytest.approx(50.0 + 49.0 + 8.0, abs=0.02)
    assert grant.expires < 107.0, "drift counts against it"
    assert not grant.doubtful(100.0)


def test_grant_that_lay_unread_is_doubtful(clocks):
    grant = received(at=130.0, granted_at=7049.0, clocks=clocks)
    assert grant.expires < 130.0
    assert grant.doubtful(130.0)
    assert not grant.doubtful(138.0), "nobody has answered"
    assert not grant.renewed(140.0).doubtful(139.0)


def test_grant_from_peer_without_clock_is_expiry_uncertain():
    grant = received(at=100.0, granted_at=7049.0, clocks=PeerClocks())
    assert (grant.doubtful(100.0), grant.ends) == (True, 108.0)


def test_grant_is_never_good_for_longer_than_from_receipt(clocks):
    assert received(at=60.0, granted_at=9000.0, clocks=clocks).expires == 68.0


@pytest.mark.parametrize("granted_at", [float("nan"), float("inf"), float("-inf")])
def test_grant_with_an_invalid_time_is_doubtful(clocks, granted_at):
    assert received(at=60.0, granted_at=granted_at, clocks=clocks).doubtful(60.0)


def test_grant_for_the_rest_of_the_prompt_serves():
    assert problem(make_grant()) is None
    assert problem(make_grant(first_token=8, pages=(9,))) is None


@pytest.mark.parametrize(
    ("changed", "error_message"),
    [
        ({"answer_by": float("nan")}, "without an end"),
        ({"answer_by": float("inf")}, "without an end"),
        ({"first_token": 3}, "grant from token 3"),
        ({"first_token": -4}, "grant from token -4"),
        ({"first_token": 12, "pages": ()}, "grant from token 12"),
        ({"pages": (4,)}, "grant of 1 pages where the prompt needs 2"),
        ({"pages": (4, 5, 6)}, "grant of 3 pages"),
        ({"pages": (4, 4)}, "names a page twice"),
        ({"receiver": make_peer("d", 2)}, "grant by d@2 in a room with d@1"),
        ({"adapter": b"a" * 16}, f"grant for KV of adapter {'61' * 16}, here the base model computes it"),
    ],
)
def test_invalid_grant_error_names_the_field(changed, error_message):
    assert error_message in problem(dataclasses.replace(make_grant(), **changed))


def test_grant_for_the_base_does_not_fit_a_prompt_of_an_adapter():
    assert "here adapter 6262" in problem(make_grant(), adapter=b"b" * 16)
    assert problem(dataclasses.replace(make_grant(), adapter=b"b" * 16), adapter=b"b" * 16) is None


@pytest.fixture
def early() -> EarlyGrants:
    return EarlyGrants(clock=ManualClock(), capacity=2)


def test_early_grant_is_taken_once(early):
    early.keep(make_grant())
    assert early.take(room_key("room", 1)) == make_grant()
    assert early.take(room_key("room", 1)) is None


def test_expired_early_grant_is_not_taken(early):  # [grant-expiry]
    early.keep(make_grant())
    early.clock.time = 8.0
    assert early.take(room_key("room", 1)) is None


def test_early_grants_are_bounded_and_the_oldest_goes_first(early):
    for room in ("a", "b", "c"):
        early.keep(make_grant(room))
    assert len(early) == 2
    assert early.take(room_key("a", 1)) is None


def test_expired_early_grants_are_dropped(early):
    early.keep(make_grant("a", expires=1.0))
    early.keep(make_grant("b", expires=2.0))
    early.clock.time = 1.0
    early.drop_expired()
    assert len(early) == 1
    assert early.take(room_key("b", 1)) is not None


def test_early_grants_of_a_dead_peer_are_dropped(early):  # [dead-peer-released]
    early.keep(make_grant())
    early.drop_from("d@2")
    assert len(early) == 1
    early.drop_from("d@1")
    assert len(early) == 0
