"""All that a run found, as it is written to a file and read from it again."""

from pathlib import Path

import msgspec

from peers.arrivals import Load
from peers.interference import Interference
from peers.limits import Limits
from peers.rounds import Sample


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one Tandem engine after all of its workloads, in bytes."""

    model: str
    dtype: str
    resident: int
    bare: int
    """Of the same process with torch imported and nothing else."""
    weights: int
    kv_pool: int

    @property
    def ratio(self) -> float:
        """What it holds over the bare import, over what it has to hold."""
        return (self.resident - self.bare) / (self.weights + self.kv_pool)


class StartupTimes(msgspec.Struct, frozen=True, kw_only=True):
    ready_s: float
    help_s: float
    parts: dict[str, float]


class Results(msgspec.Struct, kw_only=True):
    """One session on one machine."""

    date: str
    commit: str
    minutes: float = 0.0
    threads: int
    machine: dict[str, str | int]
    versions: dict[str, str]
    missing: dict[str, str]
    """Peers that could not be measured, and why."""
    failed: list[str] = msgspec.field(default_factory=list)
    """What went wrong with a peer while it was measured."""
    limits: Limits | None = None
    samples: list[Sample] = msgspec.field(default_factory=list)
    loads: list[Load] = msgspec.field(default_factory=list)
    interference: list[Interference] = msgspec.field(default_factory=list)
    memory: list[Memory] = msgspec.field(default_factory=list)
    startup: StartupTimes | None = None


def write(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
