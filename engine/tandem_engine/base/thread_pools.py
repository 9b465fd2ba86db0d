"""Thread pools that start all their threads when they are made.

Threads and processes are limited together: by `pids.max` of a container, by the `ulimit -u` of a user. A
`ThreadPoolExecutor` starts a thread when work arrives, so at the limit a request fails long after a good start, and
native libraries (libuv behind uvloop, rayon behind the tokenizers) end the process. `started_pool` takes what it needs
first: what is not to be had ends the start, with a sentence.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from tandem_engine.base.cgroups import describe_process_limit, process_limit
from tandem_engine.base.errors import ConfigError

BACKGROUND_THREADS = 4
"""Of an event loop: host names and files that are read next to what it serves."""

ENGINE_THREADS = 16
"""Of an engine's process next to those that compute."""

THREADS_PER_CPU = 3
"""Of an engine's process, for each thread that computes: pools of torch, of OpenMP and of the tokenizers."""

NATIVE_THREADS = 4
"""That libuv starts for the first host name of a process. It ends the process if it cannot."""


def started_pool(threads: int, *, name: str) -> ThreadPoolExecutor:
    """A pool of `threads` threads that run. Raises `ConfigError` when they cannot be started."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    all_started = threading.Event()
    try:
        for _ in range(threads):
            # A thread that waits takes no more work, so each of these starts another.
            pool.submit(all_started.wait)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot start {threads} threads ({name}): {describe_process_limit()}. Raise it, or run fewer processes"
        ) from error
    finally:
        all_started.set()
    return pool


async def start_background_threads() -> None:
    """Those of the running event loop, for `asyncio.to_thread` and host names. Raises `ConfigError`."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(started_pool(BACKGROUND_THREADS, name="background"))
    started_pool(NATIVE_THREADS, name="host-names").shutdown()
    with suppress(OSError):  # no name service here
        await loop.getaddrinfo("localhost", None)


def require_threads(wanted: int) -> None:
    """At the start of a process, before its first thread: check that it may start as many. Raises `ConfigError`."""
    limit = process_limit()
    if limit is not None and limit[0] + wanted > limit[1]:
        raise ConfigError(
            f"this container runs {limit[0]} of at most {limit[1]} threads and processes (pids.max), and this process "
            f"starts up to {wanted}: raise the limit (podPidsLimit of the kubelet, --pids-limit of docker)"
        )
