"""What the transfer stages require of their scheduler, and what they share: room keys and counters."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.base.names import Room
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import Finish
from tandem_engine.scheduler.prefill_adder import OvertakenReserve
from tandem_engine.scheduler.request import Request


class StageHost(Protocol):
    """The scheduler, as far as transfers need it. See `StageSide` for the contracts of the methods."""

    @property
    def memory(self) -> KvMemory: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def launched(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def admit_prebuilt(self, req: Request) -> None: ...

    def stop_of(self, req: Request) -> Finish | None: ...

    def release(self, req: Request, *, checkpoint: bool = True) -> None: ...

    def finish(self, req: Request, finish: Finish) -> None: ...

    def spare_pages(self) -> int: ...

    def overtaken_reserve(self, req: Request) -> OvertakenReserve: ...

    def unpin_idle_session(self) -> bool: ...

    def next_outside(self, requests: Iterable[Request]) -> Request | None: ...

    def spare_requests(self) -> int: ...


@dataclass(kw_only=True, slots=True)
class TransferCounters:
    """Monotonic counts of one engine, both sides of transfers together."""

    moves: int = 0
    """Grants given, and signs that more was written: it grows while transfers to here make progress."""
    committed: int = 0
    """Transfers received whole and verified."""
    handed_over: int = 0
    """Transfers sent whole."""
    exposed_s: float = 0.0
    """Of those: from the end of the prompt's computation until everything was out."""
    failed: int = 0
    """Transfers that ended otherwise, on either side, aborts by the gateway excepted."""
    moved: int = 0
    """Running requests of this engine that were handed over."""
    moves_failed: int = 0
    """Of the failed: those of running requests. They are computed again elsewhere."""
    bytes_received: int = 0
    """Of committed transfers."""
    digest_mismatches: int = 0
    quarantined: int = 0
    """Holds whose writer did not acknowledge in time."""
    ignored: int = 0
    """Messages about transfers that are not, or no longer, this engine's."""


@dataclass(kw_only=True, slots=True)
class PrefixCounters:
    """Monotonic counts of one engine, both ends together."""

    asked: int = 0
    """Fetches begun."""
    fetched: int = 0
    """Of those, the ones that brought at least a page."""
    missed: int = 0
    """Those that found nothing: the other engine had lost it, or refused."""
    failed: int = 0
    """Those that were given up: late, torn, or with their peer lost."""
    skipped: int = 0
    """Fetches that a request named and that were not begun: it is here by now, or memory is short."""
    pages: int = 0
    """Brought here."""
    bytes: int = 0
    wait_s: float = 0.0
    """From asking to the end, of all that ended."""
    served: int = 0
    """Requests of others that were served."""
    served_pages: int = 0
    quarantined: int = 0
    """Holds whose writer did not acknowledge in time."""
    digest_mismatches: int = 0
    ignored: int = 0
    """Messages for fetches that are not, or no longer, this engine's."""


class RoomKey(NamedTuple):
    """A room and the generation of the attempt in it. Nothing of another generation concerns this one."""

    room: Room
    generation: int

    def __str__(self) -> str:
        return f"{self.room}/{self.generation}"


def room_key(room: str, generation: int) -> RoomKey:
    """The key of a handoff, a push or a message that names (room, generation)."""
    return RoomKey(Room(room), generation)
