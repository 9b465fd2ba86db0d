"""How many processes of a machine compile kernels at the same time: places that they hold by locks.

Every process that misses kernels may start builders. Those that find no place end at once, so two workers, or two
commands, together have no more builders than cores. A place is free when its process ends, however it ends.
"""

import contextlib
import os
from collections.abc import Iterator

from tandem_engine.base.linux import allowed_cpus
from tandem_engine.kernels.store.layers import KernelStore

BYTES_OF_BUILDER = 400 << 20


def places(memory: int) -> int:
    """For builders, with so many bytes of memory free."""
    return max(1, min(len(allowed_cpus()), memory // BYTES_OF_BUILDER))


@contextlib.contextmanager
def place_of_builder(store: KernelStore, count: int) -> Iterator[bool]:
    """Hold one of `count` places; False where all are taken."""
    with contextlib.ExitStack() as stack:
        yield any(stack.enter_context(store.held(_name(number))) for number in range(count))


def builders_at_work(store: KernelStore) -> bool:
    """Whether a process of this machine holds a place."""
    for number in range(os.cpu_count() or 1):
        with store.held(_name(number)) as mine:
            if not mine:
                return True
    return False


def _name(number: int) -> str:
    return f"builder-{number}.lock"
