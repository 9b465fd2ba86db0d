"""Fault knobs of an engine under test: what a scenario turns, and what the engine reads.

They exist in this test package alone. An engine has them when it was started by `chaos.engine_main`, which no
image and no wheel contains, so production cannot turn them.

    scenario   writes a `Knobs` to the worker's file (atomically)        KnobFile.turn
    engine     looks at the file before each step, push and poll         KnobReader.now
    engine     notes each fault it committed in a second file            KnobReader.committed
    scenario   reads that file: a fault that did not happen proves nothing   KnobFile.committed
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

RAISED = ".raised"
"""Suffix of a folder beside the file, of processes in whose functions a scenario raises exceptions."""
ENGINE, WORKER = "engine", "worker"
"""Its parts, by process."""


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """Faults to commit. Numbers of times count down in the engine; the default commits none."""

    serial: int = 0
    """Of the writing: a new one begins new counts."""
    corrupt: int = 0
    """Transfers whose first page is scribbled over after it arrived."""
    lose_records: int = 0
    """Handoff records that do not reach the receiver."""
    repeat_records: int = 0
    """Handoff records that reach it three times."""
    reverse_messages: int = 0
    """Looks at what peers say that find it in reverse order."""
    hold_push_s: float = 0.0
    """Every push leaves this much later."""
    die_at: str = ""
    """`push`: a push was started · `before-push`: it was not · `digest`: a transfer is complete, no token yet."""
    block_s: float = 0.0
    """The scheduler thread stands still this long, once."""
    poison: int = -1
    """Token id; a step with it does what `poison_effect` says."""
    poison_effect: str = "raise"
    """`raise` or `die`."""
    lose_device: int = 0
    """Steps that find the device lost, whatever is in them."""


@dataclass(kw_only=True, slots=True)
class KnobFile:
    """The scenario's side."""

    path: Path
    _serial: int = 0

    def turn(self, **knobs: int | float | str) -> None:
        """Set these knobs and put all others back."""
        self._serial += 1
        draft = self.path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(Knobs(serial=self._serial, **knobs)))
        draft.replace(self.path)

    def committed(self, fault: str) -> int:
        """How often the engine did this so far, over all its incarnations."""
        notes = _notes(self.path)
        return Counter(notes.read_text("utf-8").split("\n"))[fault] if notes.exists() else 0


@dataclass(kw_only=True, slots=True)
class KnobReader:
    """The engine's side. A look costs one stat; any thread may look."""

    path: Path
    _seen: int = -1
    _knobs: Knobs = field(default_factory=Knobs)
    _left: dict[str, int] = field(default_factory=dict)

    def now(self) -> Knobs:
        stamp = self.path.stat().st_mtime_ns if self.path.exists() else 0
        if stamp != self._seen:
            self._seen = stamp
            self._knobs = msgspec.json.decode(self.path.read_bytes(), type=Knobs) if stamp else Knobs()
            self._left = {
                name: getattr(self._knobs, name)
                for name in ("corrupt", "lose_records", "repeat_records", "reverse_messages", "lose_device")
            }
            self._left["block_s"] = int(self._knobs.block_s > 0)
        return self._knobs

    def take(self, fault: str) -> bool:
        """Whether to commit `fault` now; counts it down and notes it."""
        self.now()
        if self._left.get(fault, 0) <= 0:
            return False
        self._left[fault] -= 1
        self.note(fault)
        return True

    def note(self, fault: str) -> None:
        with _notes(self.path).open("a", encoding="utf-8") as notes:
            notes.write(fault + "\n")


def _notes(path: Path) -> Path:
    return path.with_suffix(".committed")
