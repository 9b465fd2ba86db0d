"""How each part of a run ended, in state.json: a run that is called again does what is left."""

import enum
from pathlib import Path

import msgspec

NAME = "state.json"


class Status(enum.StrEnum):
    """Of a part."""

    RUNNING = "running"
    """Or ended from outside."""
    DONE = "done"
    LEFT = "left"
    """Some of its cases had no time."""
    CRASHED = "crashed"
    """Its process ended outside of its cases, or too often."""
    HUNG = "hung"
    """It was ended at its limit."""
    SKIPPED = "skipped"
    """The machine lacks what it needs."""
    NO_TIME = "no time"
    """It was not begun."""


class PartState(msgspec.Struct, frozen=True, kw_only=True):
    status: Status
    seconds: float = 0.0
    why: str = ""


class State(msgspec.Struct, kw_only=True):
    """Of all parts, by name."""

    parts: dict[str, PartState] = {}

    @classmethod
    def read(cls, folder: Path) -> "State":
        path = folder / NAME
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, folder: Path) -> None:
        """Atomically: a reader gets the former state or this one."""
        new = folder / f".{NAME}"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        new.replace(folder / NAME)

    def done(self, part: str) -> bool:
        return part in self.parts and self.parts[part].status is Status.DONE
