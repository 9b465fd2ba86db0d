"""Has torch and Triton imported, and forks a child for each order: a line with a module, a kind of checks, whether
those of `make test-long`, and files.

The import takes two seconds of CPU, and there are a dozen modules of two kinds each. A server is for one kind: Triton
reads TRITON_INTERPRET when it is imported. A server of kernels to compile also has Triton's digest of its own files,
which is part of the key of each compiled kernel.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch.distributed.tensor  # for the children: assert_close imports it
import triton
from triton.runtime.cache import triton_key

from tandem_testing.triton_kernels.child import run


def main() -> None:
    if not triton.knobs.runtime.interpret:
        triton_key()
    torch.set_num_threads(1)  # the suite has as many processes as cores, and tensors of checks are small
    gc.freeze()
    for order in sys.stdin:
        if (child := os.fork()) == 0:
            _obey(*json.loads(order))
        os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()
    gc.unfreeze()


def _obey(name: str, prefix: str, long: bool, out: str, log: str) -> None:
    """In the child: lines of JSON go to the file `out`, all else to `log`."""
    for path, descriptor in ((out, 1), (log, 2)):
        file = os.open(Path(path), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
    status = 1
    try:
        run(name, prefix, long=long)
        status = 0
    except BaseException:  # noqa: BLE001 - the tests whose checks did not run fail with it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
