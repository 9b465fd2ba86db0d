"""Runs the checks of a module, each kind of them in one process, and gives each to the test that asks for it."""

import ast
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

INTERPRETED, COMPILED = "check_", "compile_"
TIME_LIMIT_S = 840
"""Of a process: less than a test has. The first one on a machine compiles everything, beside others that do."""
CACHE = Path.home() / ".cache" / "tandem-triton"
"""What was compiled, by source, options and version of Triton: a kernel is compiled again once it has changed."""


@dataclass(frozen=True)
class KernelChecks:
    """The checks of `module`, which this process does not import."""

    module: str

    @property
    def names(self) -> list[str]:
        return [*self._of_kind(INTERPRETED), *self._of_kind(COMPILED)]

    @property
    def on_device(self) -> list[str]:
        """Those that take a device."""
        return self._of_kind(INTERPRETED)

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Of a test file: what one process checks stays in one process of pytest."""
        return [pytest.mark.slow, pytest.mark.timeout(TIME_LIMIT_S + 60), pytest.mark.xdist_group(self.module)]

    def passes(self, check: str) -> None:
        """Fail as `check` has failed in its process."""
        outcomes, said = _outcomes(self.module, INTERPRETED if check.startswith(INTERPRETED) else COMPILED)
        assert check in outcomes, f"the process ended before {check}:\n{said}"
        assert outcomes[check] is None, outcomes[check]

    def passes_on(self, device: str, check: str) -> None:
        """The same on a real device, in this process."""
        getattr(importlib.import_module(self.module), check)(device)

    def _of_kind(self, prefix: str) -> list[str]:
        spec = importlib.util.find_spec(self.module)
        assert spec is not None, f"no module {self.module}"
        assert spec.origin is not None, f"{self.module} is no file"
        nodes = ast.parse(Path(spec.origin).read_text("utf-8")).body
        return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith(prefix)]


@functools.cache
def _outcomes(module: str, prefix: str) -> tuple[dict[str, str | None], str]:
    """How each check ended, None if well, and what the process said besides."""
    environment = {
        "TRITON_CACHE_DIR": str(CACHE),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "TRITON_INTERPRET": "1" if prefix == INTERPRETED else "0",
    }
    command = [sys.executable, "-m", "tandem_testing.triton_kernels.child", module, prefix]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["check"]: line["failure"] for line in lines}, done.stderr
