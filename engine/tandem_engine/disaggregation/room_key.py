"""What names one attempt at one transfer, on both sides."""

from typing import NamedTuple

from tandem_engine.names import Room


class RoomKey(NamedTuple):
    """A room and the generation of the attempt in it. Nothing of another generation concerns this one."""

    room: Room
    generation: int

    def __str__(self) -> str:
        return f"{self.room}/{self.generation}"


def room_key(room: str, generation: int) -> RoomKey:
    """The key of a handoff, a push or a message that names (room, generation)."""
    return RoomKey(Room(room), generation)
