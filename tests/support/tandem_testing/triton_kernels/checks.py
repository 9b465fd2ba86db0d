"""Runs the checks of a module, each kind of them in one process, and gives each to the test that asks for it.

The processes are children of one `server` for each kind, so that torch and Triton are imported once.
"""

import ast
import atexit
import functools
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

INTERPRETED, COMPILED = "check_", "compile_"
AMPERE, HOPPER = 80, 90
"""Compute capabilities, times ten."""
OF_AMPERE = "the same kernels are compiled for Hopper; for Ampere, attention with tiles of its own"
"""Why `make test` leaves out Ampere of the checks that take an architecture."""
FOR_ARCH = " for sm_"
"""Between the name of a check and its architecture."""
TIME_LIMIT_S = 900
"""Of the first test of a kind, which waits for all. On a new machine everything is compiled, beside others that do."""
CACHE = Path.home() / ".cache" / "tandem-triton"
"""What was compiled, by source, options and version of Triton: a kernel is compiled again once it has changed."""


@dataclass(frozen=True)
class KernelChecks:
    """The checks of `module`, which this process does not import."""

    module: str

    @property
    def cases(self) -> list[Any]:
        """Parameters of a test: all names, those of Ampere with the mark `long`."""
        return [
            *self.names(INTERPRETED, long=False),
            *self.names(COMPILED, long=False),
            *(pytest.param(name, marks=pytest.mark.long(OF_AMPERE)) for name in self.names(COMPILED, long=True)),
        ]

    def names(self, prefix: str, *, long: bool) -> list[str]:
        """Of checks that begin so. A function that takes an architecture is a check for Hopper, and for Ampere one that
        `make test-long` runs."""
        checks = []
        for function in self._functions(prefix):
            takes_arch = function.name.startswith(COMPILED) and function.args.args
            if takes_arch:
                checks.append(f"{function.name}{FOR_ARCH}{AMPERE if long else HOPPER}")
            elif not long:
                checks.append(function.name)
        return checks

    @property
    def on_device(self) -> list[str]:
        """Those that take a device."""
        return self.names(INTERPRETED, long=False)

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Of a test file: what one process checks stays in one process of pytest."""
        return [pytest.mark.slow, pytest.mark.timeout(TIME_LIMIT_S), pytest.mark.xdist_group(self.module)]

    def passes(self, check: str) -> None:
        """Fail as `check` has failed in its process."""
        prefix = INTERPRETED if check.startswith(INTERPRETED) else COMPILED
        outcomes, output = _outcomes(self.module, prefix, long=check in self.names(prefix, long=True))
        assert check in outcomes, f"the process ended before {check}:\n{output}"
        assert outcomes[check] is None, outcomes[check]

    def run(self, check: str) -> None:
        """In this process. Raises what the check raises."""
        name, _, arch = check.partition(FOR_ARCH)
        arguments = ("cpu",) if name.startswith(INTERPRETED) else (int(arch),) if arch else ()
        getattr(importlib.import_module(self.module), name)(*arguments)

    def passes_on(self, device: str, check: str) -> None:
        """The same on a real device, in this process."""
        getattr(importlib.import_module(self.module), check)(device)

    def _functions(self, prefix: str) -> list[ast.FunctionDef]:
        spec = importlib.util.find_spec(self.module)
        assert spec is not None, f"no module {self.module}"
        assert spec.origin is not None, f"{self.module} is no file"
        nodes = ast.parse(Path(spec.origin).read_text("utf-8")).body
        return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith(prefix)]


@functools.cache
def _outcomes(module: str, prefix: str, *, long: bool) -> tuple[dict[str, str | None], str]:
    """How each check ended, None if well, and the process's other output."""
    with NamedTemporaryFile("r") as out, NamedTemporaryFile("r", errors="replace") as output:
        try:
            _server(prefix).do(module, prefix, long, out.name, output.name)
        except BaseException:
            # It may still be at work, and would answer the next order with this one's end.
            _server(prefix).kill()
            _server.cache_clear()
            raise
        lines = [json.loads(line) for line in out if line.startswith("{")]
        return {line["check"]: line["failure"] for line in lines}, output.read()


@functools.cache
def _server(prefix: str) -> "_Server":
    server = _Server(prefix == INTERPRETED)
    atexit.register(server.kill)
    return server


class _Server:
    """A process of `server`, which ends with this one."""

    def __init__(self, interprets: bool) -> None:
        environment = {
            "TRITON_CACHE_DIR": str(CACHE),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "TRITON_INTERPRET": "1" if interprets else "0",
        }
        command = [sys.executable, "-m", "tandem_testing.triton_kernels.server"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def do(self, *order: str | bool) -> None:
        """Returns when the child has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ended\n", "the process that checks kernels has ended"

    def kill(self) -> None:
        """With the child that is at work."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass
