"""Scripts of `tools/` as modules: they are in no package."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_tool(script: Path) -> Any:
    """The module of `script`, under its own name, so that its dataclasses find it."""
    name = f"tool_{script.stem}"
    specification = importlib.util.spec_from_file_location(name, script)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
