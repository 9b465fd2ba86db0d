"""A builder: `python -m tandem_engine.kernels.cpu.build PLACES LOGS SPEC… late SPEC…` compiles kernels into files.

numba's front end holds one lock for a whole process, so only processes compile in parallel. Several builders may have
the same specs: each passes over what is there or what another compiles. One that finds all PLACES of builders taken
ends at once. LOGS is a `LogFormat`. Kernels after `late` are compiled at a low priority, because an engine serves
without them. The status is 1 when a kernel cannot be kept, and 0 also when another builder is still at work.
"""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from tandem_engine.base.environment import kernel_environment, read_environment
from tandem_engine.base.linux import allowed_cpus, die_with_parent
from tandem_engine.base.logs import LogFormat, configure_logging
from tandem_engine.kernels.store.keys import KernelSpec
from tandem_engine.kernels.store.layers import KernelStore

# How many processes of a machine compile kernels at the same time: places that they hold by locks.
#
# Every process that misses kernels may start builders. Those that find no place end at once, so two workers, or two
# commands, together have no more builders than cores. A place is free when its process ends, however it ends.

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


logger = logging.getLogger(__name__)
LATE = "late"
LOW_PRIORITY = 10


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the process that started it; no traceback
    configure_logging(LogFormat(arguments[1]), level=read_environment().level)
    store = KernelStore.of(kernel_environment())
    with place_of_builder(store, int(arguments[0])) as mine:
        if not mine:
            return 0
        first, late = _specs(arguments[2:])
        kept = build(first)
        if late and kept:
            os.nice(LOW_PRIORITY)
            kept = build(late)
    return 0 if kept else 1


def _specs(texts: Sequence[str]) -> tuple[list[KernelSpec], list[KernelSpec]]:
    """Those before and after `late`."""
    end = texts.index(LATE) if LATE in texts else len(texts)
    first, late = ([KernelSpec.parse(text) for text in part] for part in (texts[:end], texts[end + 1 :]))
    return first, late


def build(specs: Sequence[KernelSpec]) -> bool:
    """Compile what is missing and no other process compiles. Returns whether it could be kept."""
    # numba takes half a second; a builder without a place does not need it.
    from tandem_engine.kernels.cpu.kept import is_there, kept_by, store

    for spec in specs:
        if is_there(spec):
            continue
        builder = kept_by(spec)
        with store().compiling(builder.keys(spec)[-1], wait=False) as free:
            pass
        if free:
            builder.make(spec)
            if not is_there(spec):
                return False  # the store has logged why
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
