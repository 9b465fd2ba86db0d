"""A child process that never outlives the process that started it."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies, however it dies: no orphan keeps memory or a GPU.

    Call it in the child, before or after exec (the setting survives exec). The kernel watches the
    parent's *thread* that forked, so processes are started from main threads.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # The parent died between fork and prctl.
        os.kill(os.getpid(), signal.SIGTERM)
