"""The kind of CPU that kernels are compiled for: a level that many CPUs share, or this CPU alone.

    x86-64-v2        SSE4.2                     8 lanes
    x86-64-v3        AVX2, FMA                  8 lanes
    x86-64-v4        AVX-512                    16 lanes
    x86-64-v4-bf16   AVX512-BF16 as well        16 lanes, and an instruction for pairs of bfloat16
    aarch64          NEON                       8 lanes
    native           whatever this CPU has      as its level, which code for it is never shared with

The lengths of vectors and the instructions follow from the target alone, so code for a level runs on every machine of
that level or above. `ATEN_CPU_CAPABILITY` bounds the level, as it bounds torch. `TANDEM_KERNEL_TARGET` selects one.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import llvmlite.binding

from tandem_engine.base.environment import kernel_environment
from tandem_engine.base.errors import ConfigError

_llvm: Any = llvmlite.binding
VARIABLE = "TANDEM_KERNEL_TARGET"
NATIVE = "native"

_V2 = ("cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

_WHOLE_VECTORS = "-prefer-256-bit"
"""LLVM would use half of an AVX-512 register for `x86-64-v4`, and sum in another order than on the CPU itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A kind of CPU, and what kernels for it consist of."""

    name: str
    cpu: str = ""
    """LLVM's name."""
    features: str = ""
    """Beyond those of `cpu`, as LLVM takes them."""
    requires: tuple[str, ...] = ()
    """Features, by LLVM's names."""
    wide: bool = False
    """Registers hold 16 float32 numbers, not 8."""
    pairs: bool = False
    """There is an instruction for pairs of bfloat16."""

    @property
    def numba_environment(self) -> dict[str, str]:
        """What has numba compile for this target, in the environment of a new process; nothing for `native`."""
        if not self.cpu:
            return {}
        return {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": self.features}


TARGETS = {
    target.name: target
    for target in (
        Target(name="x86-64-v2", cpu="x86-64-v2", requires=_V2),
        Target(name="x86-64-v3", cpu="x86-64-v3", requires=_V3),
        Target(name="x86-64-v4", cpu="x86-64-v4", features=_WHOLE_VECTORS, requires=_V4, wide=True),
        Target(
            name="x86-64-v4-bf16",
            cpu="x86-64-v4",
            features=f"+avx512bf16,{_WHOLE_VECTORS}",
            requires=(*_V4, "avx512bf16"),
            wide=True,
            pairs=True,
        ),
        Target(name="aarch64", cpu="generic"),
    )
}
"""Levels by name; those of x86-64 from the least to the most."""

_X86_LEVELS = tuple(target for target in TARGETS.values() if target.requires)

_BOUNDS = {"default": 1, "avx2": 2}
"""Levels that a value of ATEN_CPU_CAPABILITY leaves."""

_MACHINES = {"x86_64": _X86_LEVELS, "AMD64": _X86_LEVELS, "aarch64": (TARGETS["aarch64"],)}


@cache
def target() -> Target:
    """Of this process."""
    flags = {name for name, present in _llvm.get_host_cpu_features().items() if present}
    return chosen(kernel_environment(), flags, platform.machine())


def chosen(environment: Mapping[str, str], flags: set[str], machine: str) -> Target:
    """The target for a `machine` (as `platform.machine` names it) whose CPU has `flags`, by LLVM's names.

    Raises:
        ConfigError: TANDEM_KERNEL_TARGET names no target, or one that the CPU does not have the instructions of.
    """
    name = environment.get(VARIABLE, "")
    levels = [level for level in _MACHINES.get(machine, ()) if flags.issuperset(level.requires)]
    bound = _BOUNDS.get(environment.get("ATEN_CPU_CAPABILITY", ""))
    within = levels[:bound]
    if name not in ("", NATIVE):
        return _named(name, levels, flags)
    level = within[-1] if within else Target(name=NATIVE)
    return replace(level, name=NATIVE, cpu="", features="") if name == NATIVE else level


def _named(name: str, levels: list[Target], flags: set[str]) -> Target:
    if name not in TARGETS:
        raise ConfigError(f"{VARIABLE}={name} is none of {', '.join((*TARGETS, NATIVE))}")
    if TARGETS[name] not in levels:
        missing = [each for each in TARGETS[name].requires if each not in flags]
        why = f"this CPU has no {', '.join(missing)}" if missing else f"this machine is {platform.machine()}"
        raise ConfigError(f"{VARIABLE}={name}: {why}; it can be {', '.join(level.name for level in levels) or NATIVE}")
    return TARGETS[name]
