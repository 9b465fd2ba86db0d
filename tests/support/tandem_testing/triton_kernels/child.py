"""Runs the checks of one kind of one module and prints a line of JSON for each, as it ends.

TRITON_INTERPRET=1 python -m tandem_testing.triton_kernels.child tandem_testing.triton_kernels.digests check_
                   python -m tandem_testing.triton_kernels.child tandem_testing.triton_kernels.digests compile_

A longer prefix chooses among them.
"""

import importlib
import json
import sys
import traceback

from tandem_testing.triton_kernels import bfloat16, kept_language, scalars
from tandem_testing.triton_kernels.checks import INTERPRETED, KernelChecks


def main() -> None:
    run(*sys.argv[1:])


def run(name: str, prefix: str) -> None:
    """All checks of the module `name` whose names begin so."""
    arguments = ("cpu",) if prefix.startswith(INTERPRETED) else ()
    if arguments:
        bfloat16.install()
        scalars.install()
        kept_language.install()
    module = importlib.import_module(name)
    for check in KernelChecks(name).names:
        if not check.startswith(prefix):
            continue
        failure = None
        try:
            getattr(module, check)(*arguments)
        except Exception:  # noqa: BLE001 - the test that asks for it fails with it
            failure = traceback.format_exc()
        sys.stdout.write(json.dumps({"check": check, "failure": failure}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
