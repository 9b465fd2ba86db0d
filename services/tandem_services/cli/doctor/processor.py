"""CPU level, cores and their quota, load, compiled kernels."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from tandem_engine.base.cgroups import cpu_quota
from tandem_services.cli.doctor.finding import LIMIT_S, Check, Finding, Machine, fail, ok, warn
from tandem_services.cli.flags import bundled_model

LEVELS = {
    "x86-64-v2": frozenset("cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split()),
    "x86-64-v3": frozenset("abm avx avx2 bmi1 bmi2 f16c fma movbe".split()),
    "x86-64-v4": frozenset("avx512bw avx512cd avx512dq avx512f avx512vl".split()),
    "x86-64-v4 with bfloat16": frozenset(["avx512_bf16"]),
}
"""Flags that each level adds to those before, as /proc/cpuinfo names them."""

MIN_CORES = 2

LISTING_LIMIT_S = 30.0
"""Of the process that lists kernels: it imports torch, which takes two seconds on an idle machine."""


def checks(machine: Machine) -> Iterator[Check]:
    yield Check(name="cpu", probe=partial(level, machine))
    yield Check(name="cores", probe=partial(cores, machine))
    yield Check(name="load", probe=partial(load, machine))
    yield Check(name="kernels", probe=kernels, limit_s=LISTING_LIMIT_S + LIMIT_S)


def level(machine: Machine) -> Finding:
    lines = (machine.proc / "cpuinfo").read_text().splitlines()
    flags = next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), None)
    if flags is None:
        return ok("not an x86 CPU: kernels use what the compiler finds")
    reached = "x86-64"
    for name, needed in LEVELS.items():
        if not needed <= flags:
            break
        reached = name
    if reached == "x86-64":
        return fail("the CPU has no SSE 4.2", "use a CPU of level x86-64-v2 or later; torch needs it")
    if reached == "x86-64-v2":
        return warn(
            "the CPU has no AVX2: CPU kernels are several times slower", "use a CPU of level x86-64-v3 or later"
        )
    return ok(reached)


def cores(machine: Machine) -> Finding:
    """Engines have as many threads as can compute at the same time."""
    allowed, quota = len(machine.cpus), cpu_quota(proc=machine.proc, cgroups=machine.cgroup)
    fact = f"{allowed} CPUs" if quota is None else f"{allowed} CPUs, a quota of {quota:g}"
    usable = allowed if quota is None else min(allowed, quota)
    if usable < MIN_CORES:
        return warn(f"{fact}: two workers compete for it", "--prefill 0 --decode 0 --both 1, or a higher quota")
    return ok(fact)


def load(machine: Machine) -> Finding:
    recent = float((machine.proc / "loadavg").read_text().split()[0])
    fact = f"load {recent:g} on {len(machine.cpus)} cores"
    return (
        warn(fact, "stop what else computes here: a step is as slow as its slowest thread")
        if (recent > len(machine.cpus))
        else ok(fact)
    )


def kernels(command: tuple[str, ...] | None = None) -> Finding:
    """Of the bundled model: whether the next start compiles any."""
    listing = ("kernels", "list", "--model", str(bundled_model()), "--dtype", "float32")
    try:
        done = subprocess.run(
            command or (sys.executable, "-m", "tandem_engine.cli", *listing),
            capture_output=True,
            text=True,
            check=False,
            timeout=LISTING_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return warn(f"not listed within {LISTING_LIMIT_S:g} s", "try again when the machine is idle")
    states = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    if not states:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        return warn(f"kernels cannot be listed: {last}", "tandem kernels list")
    missing = states.count("missing")
    if missing:
        return warn(
            f"{missing} of {len(states)} kernels of the bundled model are not compiled: its first start does that",
            "tandem kernels build",
        )
    return ok(f"all {len(states)} kernels of the bundled model are compiled")
