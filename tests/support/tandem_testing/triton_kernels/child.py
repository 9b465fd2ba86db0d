"""Runs the checks of one kind of one module and prints a line of JSON for each, as it ends.

TRITON_INTERPRET=1 python -m tandem_testing.triton_kernels.child tandem_testing.triton_kernels.digests check_
                   python -m tandem_testing.triton_kernels.child tandem_testing.triton_kernels.digests compile_

A longer prefix chooses among them. With "long" behind it, those of `make test-long` run instead.
"""

import gc
import importlib
import json
import sys
import traceback

from tandem_testing.triton_kernels import bfloat16, kept_language, scalars
from tandem_testing.triton_kernels.checks import INTERPRETED, KernelChecks


def main() -> None:
    name, prefix, *more = sys.argv[1:]
    run(name, prefix, long=more == ["long"])


def run(name: str, prefix: str, *, long: bool) -> None:
    """All checks of the module `name` whose names begin so, of those that `make test-long` runs or of the others."""
    if prefix.startswith(INTERPRETED):
        bfloat16.install()
        scalars.install()
        kept_language.install()
    checks = KernelChecks(name)
    importlib.import_module(checks.module)
    for check in checks.names(prefix, long=long):
        # An engine collects garbage before it captures graphs, and would look through all that was imported.
        gc.collect()
        gc.freeze()
        failure = None
        try:
            checks.run(check)
        except Exception:  # noqa: BLE001 - the test that asks for it fails with it
            failure = traceback.format_exc()
        sys.stdout.write(json.dumps({"check": check, "failure": failure}) + "\n")
        sys.stdout.flush()
    gc.unfreeze()


if __name__ == "__main__":
    main()
