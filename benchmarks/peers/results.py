"""All that a run found, as it is written to a file and read from it again."""

from pathlib import Path

import msgspec

from peers.arrivals import Load
from peers.interference import Interference
from peers.limits import Limits
from peers.rounds import Sample


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engine process of one Tandem worker at rest, after its KV pool was full, in bytes."""

    model: str
    dtype: str
    resident: int
    bare: int
    """Of a process that has imported torch and nothing else."""
    weights: int
    kv_pool: int
    own: float = 0.0
    """The ratio without pages of files, which all workers of a machine share."""
    stage: str = ""

    @property
    def ratio(self) -> float:
        """What it holds over the bare import, over what it has to hold."""
        return (self.resident - self.bare) / (self.weights + self.kv_pool)


class HeldWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does with its projections held in some type, by `benchmarks/cpu_engine.py`."""

    model: str
    dtype: str
    held: str
    """"dtype" or "int8"."""
    decode_ms: float
    """Per token of one stream."""
    decode_share: float
    """Least time in which memory gives the weights so held, over the time it took."""
    prefill: float
    """Tokens a second of a prompt of 2,048."""
    stage: str = ""


class StartupTimes(msgspec.Struct, frozen=True, kw_only=True):
    ready_s: float
    help_s: float
    parts: dict[str, float]


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one stage of a run went."""

    name: str
    seconds: float
    allotted_s: float
    """After which it began nothing more."""
    notes: list[str] = []
    """What was cut for want of time, and what failed; nothing of a stage that is complete."""

    @property
    def complete(self) -> bool:
        return not self.notes


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
    stages: list[StageReport] = msgspec.field(default_factory=list)
    """In the order they ended."""
    limits: Limits | None = None
    samples: list[Sample] = msgspec.field(default_factory=list)
    loads: list[Load] = msgspec.field(default_factory=list)
    interference: list[Interference] = msgspec.field(default_factory=list)
    memory: list[Memory] = msgspec.field(default_factory=list)
    held: list[HeldWeights] = msgspec.field(default_factory=list)
    startup: StartupTimes | None = None

    def notes(self, stage: str, *engines: str) -> list[str]:
        """Why a stage has no figures of these engines."""
        wanted = tuple(f"{name}: " for name in (stage, *engines))
        notes = [note for each in self.stages if each.name == stage for note in each.notes]
        return [note for note in notes if note.startswith((CUT, *wanted))]


STARTUP = "start-up"
BESIDE_CONTINUOUS = " beside continuous batching"
DISAGGREGATED = " disaggregated"
DECODES_UNDER_PROMPTS = " long decodes under arriving prompts"
"""Stages are named by model and dtype, and by these where there are several."""
CUT = "cut: "
"""How a note of what there was no time for begins."""


def complete_part(results: Results) -> Results:
    """Without what stages left that were not complete: they are run again."""
    done = {stage.name for stage in results.stages if stage.complete}
    return msgspec.structs.replace(
        results,
        stages=[stage for stage in results.stages if stage.name in done],
        samples=[each for each in results.samples if each.stage in done],
        loads=[each for each in results.loads if each.stage in done],
        interference=[each for each in results.interference if each.stage in done],
        memory=[each for each in results.memory if each.stage in done],
        held=[each for each in results.held if each.stage in done],
    )


def write(results: Results, path: Path) -> None:
    """Atomic: a reader finds the old results or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    partial.replace(path)


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)
