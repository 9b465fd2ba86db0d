"""The parts of a run, in the order of their worth: figures before tests, for a wrong result is found by `probe`.

A part is a module of `gpu.parts` with a function `run(bench)`. Its process imports it, not the runner, which has to
outlive it and takes nothing of the device.
"""

from dataclasses import dataclass

from gpu.control.needs import Need, memory, modules, tool

REHEARSAL = 10.0
"""Times every limit where the programs are tried on a CPU, which others may use."""

ENGINE = modules("msgspec", "zmq", "llguidance", "xxhash", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part, its limit in seconds, and what it needs of the machine."""

    name: str
    seconds: float
    run: str
    """A module with a function `run`, and an argument for it after a colon."""
    needs: tuple[Need, ...] = (ENGINE,)
    needs_device: tuple[Need, ...] = ()
    """What only a run on a device needs, not one that tries the programs."""


PARTS = (
    Part(name="probe", seconds=90, run="gpu.parts.probe"),
    Part(name="engine-latents", seconds=180, run="gpu.parts.engine:V2-Lite", needs_device=(memory(50),)),
    Part(name="engine-states", seconds=180, run="gpu.parts.engine:Next", needs_device=(memory(70),)),
    Part(name="kernels", seconds=240, run="gpu.parts.kernels"),
    Part(name="engine-8b", seconds=420, run="gpu.parts.engine:8B", needs_device=(memory(40),)),
    Part(name="engine-30b", seconds=420, run="gpu.parts.engine:30B-A3B", needs_device=(memory(75),)),
    Part(name="engine-0.6b", seconds=180, run="gpu.parts.engine:0.6B"),
    Part(name="handoff", seconds=240, run="gpu.parts.handoff", needs=(ENGINE, modules("nixl"))),
    Part(name="tests-exact", seconds=480, run="gpu.parts.tests:exact", needs=(ENGINE, modules("pytest"))),
    Part(name="tests-rest", seconds=480, run="gpu.parts.tests:rest", needs=(ENGINE, modules("pytest"))),
    Part(name="sanitize", seconds=240, run="gpu.parts.sanitize", needs_device=(tool("compute-sanitizer"),)),
    Part(name="trace", seconds=120, run="gpu.parts.trace"),
    Part(name="counters", seconds=120, run="gpu.parts.counters", needs_device=(tool("ncu"),)),
)


def named(names: str) -> tuple[Part, ...]:
    """Parts by their names, divided by commas, in the order of their worth. Raises `ValueError` for an unknown one."""
    wanted = [name for name in names.split(",") if name]
    known = [part.name for part in PARTS]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ValueError(f"must name some of {', '.join(known)}, got {names!r}")
    return tuple(part for part in PARTS if part.name in wanted)
