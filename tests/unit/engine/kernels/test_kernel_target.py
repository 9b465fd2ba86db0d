"""The kind of CPU that kernels are compiled for."""

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.kernels.cpu import vectors
from tandem_engine.kernels.cpu.target import TARGETS, chosen, target

V2, V3, V4, BF16 = (set(TARGETS[name].requires) for name in ("x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16"))


@pytest.mark.parametrize(
    ("flags", "machine", "name", "lanes", "pairs"),
    [
        (V2, "x86_64", "x86-64-v2", 8, False),
        (V3, "x86_64", "x86-64-v3", 8, False),
        (V4, "x86_64", "x86-64-v4", 16, False),
        (BF16 | {"amx-bf16"}, "x86_64", "x86-64-v4-bf16", 16, True),
        (BF16 - {"avx512vl"}, "x86_64", "x86-64-v3", 8, False),
        (V2 - {"popcnt"}, "x86_64", "native", 8, False),
        ({"neon"}, "aarch64", "aarch64", 8, False),
        (set(), "riscv64", "native", 8, False),
    ],
)
def test_target_is_the_highest_level_of_a_cpu(flags, machine, name, lanes, pairs):
    found = chosen({}, flags, machine)
    assert (found.name, 16 if found.wide else 8, found.pairs) == (name, lanes, pairs)


@pytest.mark.parametrize(
    ("capability", "name"),
    [("avx512", "x86-64-v4-bf16"), ("avx2", "x86-64-v3"), ("default", "x86-64-v2"), ("", "x86-64-v4-bf16")],
)
def test_capability_of_torch_bounds_the_level(capability, name):
    assert chosen({"ATEN_CPU_CAPABILITY": capability}, BF16, "x86_64").name == name


def test_tandem_kernel_target_selects_the_kernel_level():
    assert chosen({"TANDEM_KERNEL_TARGET": "x86-64-v3"}, BF16, "x86_64") == TARGETS["x86-64-v3"]


def test_native_code_has_the_vectors_of_the_level():
    native = chosen({"TANDEM_KERNEL_TARGET": "native"}, BF16, "x86_64")
    assert (native.name, native.wide, native.pairs) == ("native", True, True)
    assert native.numba_environment == {}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("x86-64-v5", "is none of x86-64-v2, x86-64-v3, x86-64-v4, x86-64-v4-bf16, aarch64, native"),
        (
            "x86-64-v4",
            "this CPU has no avx512f, .*, avx512vl; it can be x86-64-v2, x86-64-v3",
        ),
    ],
)
def test_target_that_the_cpu_cannot_run_is_refused(name, error):
    with pytest.raises(ConfigError, match=f"TANDEM_KERNEL_TARGET={name}.*{error}"):
        chosen({"TANDEM_KERNEL_TARGET": name}, V3, "x86_64")


def test_kernels_have_the_vectors_of_the_target():
    assert (16 if target().wide else 8, target().pairs) == (vectors.LANES, vectors.MULTIPLIES_PAIRS)


def test_vectors_are_as_wide_as_those_of_torch():
    """Both follow from the flags of this CPU and from ATEN_CPU_CAPABILITY."""
    assert target().wide == (torch.backends.cpu.get_cpu_capability() == "AVX512")
