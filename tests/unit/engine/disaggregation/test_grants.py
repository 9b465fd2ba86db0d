"""Write grants on the writing side."""

import dataclasses

import pytest

from tandem_engine.disaggregation.grants import EarlyGrants, Grant
from tandem_engine.disaggregation.room_key import room_key
from tandem_engine.messages.transfer import WriteGrant
from tandem_engine.names import DigestKind, PageId
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
        digest=DigestKind.SAMPLED,
    )


def problem(grant: Grant, *, tokens: int = 10) -> str | None:
    return grant.problem(tokens=tokens, page_size=4, peer=DECODE.incarnation)


def test_validity_counts_from_receipt():  # T75
    clock = ManualClock()
    clock.time = 100.0
    message = WriteGrant(
        room="room",
        generation=2,
        sender=DECODE,
        writer="p@1",
        first_token=0,
        pages=(1,),
        valid_s=8.0,
        digest=DigestKind.FULL,
    )
    grant = Grant.received(message, clock)
    assert (grant.key, grant.expires) == (room_key("room", 2), 108.0)


def test_a_grant_for_the_rest_of_the_prompt_serves():
    assert problem(make_grant()) is None
    assert problem(make_grant(first_token=8, pages=(9,))) is None


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"expires": float("nan")}, "without an end"),
        ({"expires": float("inf")}, "without an end"),
        ({"first_token": 3}, "grant from token 3"),
        ({"first_token": -4}, "grant from token -4"),
        ({"first_token": 12, "pages": ()}, "grant from token 12"),
        ({"pages": (4,)}, "grant of 1 pages where the prompt needs 2"),
        ({"pages": (4, 5, 6)}, "grant of 3 pages"),
        ({"pages": (4, 4)}, "names a page twice"),
        ({"receiver": make_peer("d", 2)}, "grant by d@2 in a room with d@1"),
    ],
)
def test_a_grant_that_does_not_fit_names_what_is_wrong(changed, complaint):
    assert complaint in problem(dataclasses.replace(make_grant(), **changed))


@pytest.fixture
def early() -> EarlyGrants:
    return EarlyGrants(clock=ManualClock(), capacity=2)


def test_an_early_grant_is_taken_once(early):
    early.keep(make_grant())
    assert early.take(room_key("room", 1)) == make_grant()
    assert early.take(room_key("room", 1)) is None


def test_an_expired_early_grant_is_not_taken(early):  # T62
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


def test_early_grants_of_a_dead_peer_are_dropped(early):  # T74
    early.keep(make_grant())
    early.drop_from("d@2")
    assert len(early) == 1
    early.drop_from("d@1")
    assert len(early) == 0
