"""Where and with what a part ran. Clocks, power and partitions are read, never set."""

import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gpu.kit.manifest import KitError, Manifest
from gpu.kit.pins import ROOT

PACKAGES = ("torch", "triton", "transformers", "numpy", "nixl", "msgspec", "pyzmq", "llguidance")
FIELDS = ("driver_version", "persistence_mode", "mig.mode.current", "power.limit", "clocks.max.sm", "clocks.max.mem")
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def facts(device: torch.device) -> dict[str, str]:
    """Versions, commit and the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "device": name,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "absent",
        **{package: _version(package) for package in PACKAGES},
        **(_smi(FIELDS) if device.type == "cuda" else {}),
    }


def clocks(device: torch.device) -> str:
    """What the device runs at now."""
    if device.type != "cuda":
        return ""
    return ", ".join(f"{name} {value}" for name, value in _smi(CLOCKS).items())


def commit(root: Path) -> str:
    """Of the tree; where it has no history, that of the kit that came with it."""
    done = _output(["git", "describe", "--always", "--dirty"], cwd=root)
    if done:
        return done
    try:
        return f"{Manifest.read(root / 'kit').commit} (of the kit)"
    except KitError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _smi(fields: Sequence[str]) -> dict[str, str]:
    printed = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"])
    values = [value.strip() for value in printed.split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {"nvidia-smi": printed or "absent"}


def _output(command: Sequence[str], cwd: Path | None = None) -> str:
    """What a program printed; nothing where it is absent or fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
