"""The wheel of `tandem-llm-valkey`, made of the redis-server of this machine, and installed by pip into a folder.

What a build from Debian's sources makes is published; a test needs a wheel of the same form that runs here.
"""

import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tandem_testing.redis_server import REDIS_SERVER

TOOL = Path(__file__).resolve().parents[3] / "tools/valkey/wheel.py"
NEEDS_READELF = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")


def wheel_tool() -> ModuleType:
    """tools/valkey/wheel.py."""
    spec = spec_from_file_location("valkey_wheel_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path) -> Path:
    """Of this machine's redis-server."""
    assert REDIS_SERVER is not None
    tool = wheel_tool()
    licenses = folder / "copyright"
    licenses.write_text("BSD-3-Clause")
    return Path(tool.write_wheel(tool.Server.read(Path(REDIS_SERVER)), copyright_file=licenses, out=folder))


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Returns `folder`, for PYTHONPATH."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target"]
    subprocess.run([*command, str(folder), str(wheel)], check=True, capture_output=True)
    return folder
