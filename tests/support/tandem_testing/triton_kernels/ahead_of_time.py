"""Machine code for devices that are not there: it needs Triton's wheel alone, which brings NVIDIA's assembler.

What a kernel takes of a device is known without one: registers and stack are in the cubin, shared memory is in what
Triton wants at launch.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tandem_testing.triton_kernels.checks import AMPERE, HOPPER

SHARED_LIMIT = {AMPERE: 163 << 10, HOPPER: 227 << 10}
"""Bytes of shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities)."""
REGISTER_FILE = 64 << 10
"""Registers of a multiprocessor."""
SHARED_OF_ALL, SHARED_RESERVED = {AMPERE: 164 << 10, HOPPER: 228 << 10}, 1 << 10
"""Bytes of shared memory of a multiprocessor, and of them what each block takes for itself."""
MAX_WARPS = 64
"""Of a multiprocessor."""
BEFORE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
"""Such a Triton has no float8 for devices before sm_89: it leaves conversions to instructions that they lack."""
MAX_COPY = 16
"""Bytes that a thread copies to shared memory at once, at most."""
FLOAT8_COPY = 8
"""The same of pages of float8: Triton lays them out for products of numbers of two bytes, eight to a thread."""
_BUFFER = re.compile(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(?P<count>\d+)x\d+x\d+x")
_WAIT = re.compile(r"ttg\.async_wait .*\{num = (?P<count>\d+)")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\s*\[[^]]*\],\s*\[[^]]*\],\s*(?P<bytes>0x[0-9a-f]+|\d+)")
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9]*)", re.MULTILINE)
_RESOURCES = re.compile(r"Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What a kernel became."""

    name: str
    arch: int
    num_warps: int
    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread, in device memory: what registers spill to."""
    shared_bytes: int
    """Of a block."""
    ptx: str
    ttgir: str
    cubin: bytes = field(repr=False)

    def assert_pipelined(self, *, buffers: int) -> None:
        """K and V have so many buffers each, and with several of them the loop waits for an older block than the last.

        A single buffer is filled, awaited and read in turn.
        """
        found = [int(each["count"]) for each in _BUFFER.finditer(self.ttgir)]
        assert len(found) >= 2, f"{self.what} does not read K and V into shared memory ahead"
        assert min(found) >= buffers, f"{self.what} has {found} buffers of K and V, not {buffers}"
        waits = [int(each["count"]) for each in _WAIT.finditer(self.ttgir)]
        assert buffers == 1 or max(waits) > 0, f"{self.what} waits for each block as soon as it has asked for it"

    def assert_wide_copies(self, *, at_least: int = MAX_COPY) -> None:
        """Nine of ten bytes that are copied to shared memory ahead are copied so many at a time, or more."""
        sizes = [int(found["bytes"], 0) for found in _COPY.finditer(self.ptx)]
        assert sizes, f"{self.what} copies nothing to shared memory ahead"
        wide = sum(size for size in sizes if size >= at_least)
        assert wide >= 0.9 * sum(sizes), f"{self.what} copies {sorted(set(sizes))} bytes at a time"

    def resident(self) -> int:
        """Blocks that a multiprocessor runs at once."""
        registers = -(-self.registers // 8) * 8 * 32 * self.num_warps
        shared = self.shared_bytes + SHARED_RESERVED
        return min(SHARED_OF_ALL[self.arch] // shared, REGISTER_FILE // registers, MAX_WARPS // self.num_warps)

    def instructions(self) -> "Counter[str]":
        """How often each opcode is in the machine code, without modifiers."""
        with _as_file(self.cubin) as path:
            command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return Counter(found["opcode"] for found in _OPCODE.finditer(listing))

    def assert_fits(self) -> None:
        """It launches on its device and nothing spills."""
        assert self.stack_bytes == 0, f"{self.what} spills {self.stack_bytes} bytes a thread"
        limit = SHARED_LIMIT[self.arch]
        assert self.shared_bytes <= limit, f"{self.what} wants {self.shared_bytes} bytes of shared memory of {limit}"
        threads = self.num_warps * 32
        assert self.registers * threads <= REGISTER_FILE, f"{self.what} wants {self.registers} registers a thread"

    @property
    def what(self) -> str:
        return f"{self.name} for sm_{self.arch} with {self.num_warps} warps"


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
    enable_fp_fusion: bool = True,
) -> Compiled:
    """Compile `kernel`, a function under `triton.jit`, for a device of compute capability arch / 10.

    Args:
        signature: types of the arguments, as "i32", "fp32", "*bf16". With ":16" behind, its value is a multiple of 16
            (of an address: bytes), as a launch would find; loads of several words at once need that.
        constants: all other parameters.
        enable_fp_fusion: whether a product and a sum may become one operation, which rounds once.
    """
    missing = set(kernel.arg_names) - set(signature) - set(constants)
    assert not missing, f"{kernel.__name__}: neither types nor values of {sorted(missing)}"
    aligned = {(kernel.arg_names.index(name),) for name, kind in signature.items() if kind.endswith(":16")}
    kinds = {name: kind.removesuffix(":16") for name, kind in signature.items()}
    source = ASTSource(
        fn=kernel,
        signature=kinds | dict.fromkeys(constants, "constexpr"),
        constexprs=dict(constants),
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
    options |= {"maxnreg": maxnreg} if maxnreg else {}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert f".target sm_{arch}" in built.asm["ptx"]
    registers, stack = _resources(built.asm["cubin"], built.name)
    return Compiled(
        name=built.name,
        arch=arch,
        num_warps=built.metadata.num_warps,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=built.metadata.shared,
        ptx=built.asm["ptx"],
        ttgir=built.asm["ttgir"],
        cubin=built.asm["cubin"],
    )


@contextmanager
def launches_that_only_compile(arch: int) -> Iterator[list[str]]:
    """Within, launches compile for a device that is not there, and run nothing. Yields the names of what was compiled.

    So a launch is checked as the engine makes it: types and values of arguments, and what is compiled again for them.
    """
    compiled: list[str] = []

    def launch(kernel: Any, grid: Any) -> Any:
        return lambda *args, **options: kernel.run(*args, grid=grid, warmup=True, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", launch, raising=False)
        patch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
        patch.setattr(triton.runtime.driver, "_active", _AbsentDevice(arch))
        yield compiled


@dataclass(frozen=True, slots=True)
class Launch:
    """What Triton would compile for one launch, once however often it comes."""

    kernel: str
    key: str
    """Types, alignment and values of the arguments, and options."""


@contextmanager
def launches_that_are_only_noted(arch: int) -> Iterator[set[Launch]]:
    """Within, launches run nothing and compile nothing, and tensors begin with zeros, which is what kernels then leave.

    Yields what would be compiled for a device that is not there. It costs microseconds a launch, so whole engines can
    be looked at: the rest of a step is computed, of zeros.
    """
    noted: set[Launch] = set()

    def launch(kernel: Any, grid: Any) -> Any:
        def note(*args: Any, **options: Any) -> None:
            *_, bind = kernel.device_caches[0]
            _, specialization, rest = bind(*args, **options)
            noted.add(Launch(kernel.__name__, f"{specialization} {rest}"))

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "__getitem__", launch, raising=False)
        patch.setattr(triton.runtime.driver, "_active", _AbsentDevice(arch))
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        yield noted


@dataclass(frozen=True)
class _AbsentDevice:
    """As much of a driver as compiling asks for."""

    arch: int

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def _resources(cubin: bytes, name: str) -> tuple[int, int]:
    """Registers and bytes of stack of a thread of the kernel `name`."""
    with _as_file(cubin) as path:
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for found in _RESOURCES.finditer(listing):
        if found["name"] == name:
            return int(found["registers"]), int(found["stack"])
    raise AssertionError(f"cuobjdump does not list {name}:\n{listing}")


@contextmanager
def _as_file(cubin: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        yield path
