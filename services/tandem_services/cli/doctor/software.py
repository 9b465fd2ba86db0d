"""Python, packages, and the build of torch against the GPU and its driver."""

import platform
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tandem_engine.base.extras import EXTRAS
from tandem_engine.base.release import install_hint
from tandem_services.cli.doctor.finding import Check, Finding, Machine, fail, ok, warn

MIN_PYTHON = (3, 11)
MIN_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA → the first driver for it (NVIDIA's table of minor version compatibility)."""

_DRIVER = re.compile(r"Kernel Module.*?\s(\d+)\.(\d+)")
_CUDA = re.compile(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", re.MULTILINE)


def checks(machine: Machine) -> Iterator[Check]:
    yield Check(name="python", probe=python)
    yield Check(name="packages", probe=packages)
    yield Check(name="torch", probe=partial(torch_build, machine, torch_cuda()))
    yield Check(name="gpu driver", probe=partial(driver, machine, torch_cuda()))


def python(found: tuple[int, ...] = tuple(sys.version_info[:3]), system: str = sys.platform) -> Finding:
    fact = f"Python {'.'.join(map(str, found))} on {system}, {platform.machine()}"
    if found[:2] < MIN_PYTHON:
        return fail(
            fact, f"install Python {'.'.join(map(str, MIN_PYTHON))} or later, and Tandem in an environment of it"
        )
    if system != "linux":
        return fail(fact, "run Tandem on Linux")
    return ok(fact)


def packages(modules: tuple[str, ...] = EXTRAS["engine"]) -> Finding:
    """Those of the engine: without them only gateways and routers run."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        return fail(f"missing for an engine: {', '.join(missing)}", install_hint("engine"))
    return ok(f"all {len(modules)} modules of the engine are installed")


def torch_cuda() -> tuple[int, int] | None:
    """Version of CUDA that torch was built for, without importing it; None for a build without, or no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = _CUDA.search(file.read_text()) if file.is_file() else None
    return None if found is None else (int(found[1]), int(found[2]))


def torch_build(machine: Machine, cuda: tuple[int, int] | None) -> Finding:
    version = machine.version_of("torch")
    if version is None:
        return fail("torch is not installed", install_hint("engine"))
    if cuda is None and machine.has_gpu:
        return warn(
            f"torch {version} is a build without CUDA, and an NVIDIA GPU is there",
            f"pip uninstall -y torch && {install_hint('engine')}",
        )
    build = f"for CUDA {cuda[0]}.{cuda[1]}" if cuda else "for CPUs"
    return ok(f"torch {version} {build}, {'an NVIDIA GPU' if machine.has_gpu else 'no NVIDIA GPU'}")


def driver(machine: Machine, cuda: tuple[int, int] | None) -> Finding:
    if not machine.has_gpu:
        return ok("no NVIDIA GPU")
    file = machine.proc / "driver/nvidia/version"
    found = _DRIVER.search(file.read_text()) if file.is_file() else None
    if found is None:
        return warn(f"{file} does not name the driver", "run nvidia-smi, and install the driver if it fails")
    fact = f"driver {found[1]}.{found[2]}"
    needed = MIN_DRIVER.get(cuda[0]) if cuda else None
    if cuda and needed and int(found[1]) < needed:
        return fail(
            f"{fact} is older than {needed}, which CUDA {cuda[0]} of this torch needs",
            f"install driver {needed} or later, or a build of torch for an older CUDA",
        )
    return ok(fact)
