"""A builder: `python -m tandem_engine.kernels.cpu.build PLACES LOGS SPEC… late SPEC…` compiles kernels into files.

numba's front end holds one lock for a whole process, so only processes compile in parallel. Several builders may have
the same specs: each passes over what is there or what another compiles. One that finds all PLACES of builders taken
ends at once. LOGS is a `LogFormat`. Kernels after `late` are compiled at a low priority, because an engine serves
without them. The status is 1 when a kernel cannot be kept, and 0 also when another builder is still at work.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from tandem_engine.base.environment import kernel_environment, read_environment
from tandem_engine.base.linux import die_with_parent
from tandem_engine.base.logs import LogFormat, configure_logging
from tandem_engine.kernels.store.keys import KernelSpec
from tandem_engine.kernels.store.layers import KernelStore
from tandem_engine.kernels.store.slots import place_of_builder

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
