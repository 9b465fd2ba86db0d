"""What ranks and their part of a transfer are called, where NIXL and the digests need a name.

    agent   incarnation#rank                       of an engine that is alone: its incarnation
    room    sender/senders>receiver/receivers|room   one slice of the pages of a room

A slice's room names both ranks and the ranks of both sides, so its digests are bound to its place (`digest`), and
what is reported of it says which part of what it is.
"""

import re
from typing import NamedTuple

from tandem_engine.messages.transfer import MAX_RANKS

_ROOM = re.compile(
    r"(?P<sender>\d{1,3})/(?P<senders>\d{1,3})>(?P<receiver>\d{1,3})/(?P<receivers>\d{1,3})\|(?P<room>.+)",
    re.DOTALL | re.ASCII,
)


class SliceRoom(NamedTuple):
    """One rank's writes to another in one room."""

    room: str
    sender: int
    senders: int
    receiver: int
    receivers: int


def agent_name(incarnation: str, *, rank: int, ranks: int) -> str:
    return incarnation if ranks == 1 else f"{incarnation}#{rank}"


def slice_room(name: SliceRoom) -> str:
    return f"{name.sender}/{name.senders}>{name.receiver}/{name.receivers}|{name.room}"


def read_slice_room(text: str) -> SliceRoom | None:
    """None for what `slice_room` would not have written."""
    found = _ROOM.fullmatch(text)
    if found is None:
        return None
    sender, senders, receiver, receivers = (int(found[n]) for n in ("sender", "senders", "receiver", "receivers"))
    if not (sender < senders <= MAX_RANKS and receiver < receivers <= MAX_RANKS):
        return None
    return SliceRoom(found["room"], sender, senders, receiver, receivers)
