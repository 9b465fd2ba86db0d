"""How much Python executes: a measure of work that no machine, and nothing else that runs there, has a part in."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def opcodes_of(action: Callable[[], object]) -> int:
    """Bytecodes that `action` executes in Python, but for those in `uncounted` and of garbage that others have left."""
    executed = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal executed
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.collect()
    # What is found to be garbage may have a finalizer in Python, which would count whenever it happens to be found.
    gc.disable()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return executed


@contextmanager
def uncounted() -> Iterator[None]:
    """What is called within does not count: frames that begin there are not looked at."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)
