"""Files that cannot be opened for a while, so that a read is in progress for as long as a test wants."""

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def readers_held_up(file: Path) -> AsyncIterator[asyncio.Event]:
    """A process that opens `file` waits until this ends, at most for /proc/sys/fs/lease-break-time. The event: one
    does.

    A lease of Linux, which the event loop of the main thread alone can take: the kernel sends SIGIO.
    """
    waits, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGIO, waits.set)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield waits
    finally:
        os.close(descriptor)
        loop.remove_signal_handler(signal.SIGIO)
