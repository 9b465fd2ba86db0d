"""How many kernels Triton has compiled in this process, before it served requests and since then.

Triton compiles a kernel at its first launch, and again for each other kind of arguments: another constant, an address
that is no multiple of 16, a number that is 1. A launch that is the first of its kind waits for that, for seconds where
nothing is cached on disk and for milliseconds where it is, and with it every request. So an engine launches whatever
it can before it serves (`executor.warm_up`), and what is compiled later is counted and named: it is missing there.

Triton has one listener for a process, so there is one counter. Importing this needs no Triton; `watch` and
`require_private_kernels` do.

Kernels in Triton's folder on disk are code that this process runs, so no other user may write to it.
"""

import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.progress import START

logger = logging.getLogger(__name__)
MICROSECOND = 1e-6
Listener = Callable[..., object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiles:
    """Kernels, those that came from Triton's cache on disk included."""

    starting: int = 0
    serving: int = 0


class CompileCounter:
    """Counts what Triton compiles. Any thread may launch kernels while it counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Compiles()
        self._serving = False
        self._watching: Listener | None = None

    @property
    def counts(self) -> Compiles:
        """So far."""
        return self._counts

    def watch(self) -> None:
        """Count from now on. A listener that was set before is still called. Idempotent."""
        import triton

        knobs = triton.knobs.compilation
        if self._watching is not None and knobs.listener is self._watching:
            return
        before = knobs.listener

        def listener(**compiled: Any) -> None:
            self.compiled(**compiled)
            if before is not None:
                before(**compiled)

        self._watching = knobs.listener = listener

    def serve(self) -> None:
        """Count as `serving` from now on: requests wait for what is compiled."""
        self._serving = True

    def compiled(self, *, src: Any, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **_: object) -> None:
        """Triton's listener: one kernel was compiled, or read from its cache on disk."""
        with self._lock:
            counts, serving = self._counts, self._serving
            self._counts = Compiles(starting=counts.starting + (not serving), serving=counts.serving + serving)
        if not serving and not cache_hit:
            START.kernel_missing()
            START.kernel_compiled()
        logger.log(
            logging.WARNING if serving else logging.DEBUG,
            "kernel %s was %s %s, in %.3f s; its key: %s",
            src.name,
            "read from Triton's cache" if cache_hit else "compiled",
            "while serving: requests waited for it" if serving else "before serving",
            times.total * MICROSECOND,
            key_of(src, metadata),
        )


def kernel_folder() -> Path:
    """Where Triton keeps compiled kernels of this process."""
    import triton

    return Path(triton.knobs.cache.dir)


def require_private_kernels() -> None:
    """As `require_private_cache`, of the folder that Triton uses in this process."""
    require_private_cache(kernel_folder())


def require_private_cache(folder: Path) -> None:
    """Make Triton's `folder`, if it is absent, for this user alone. Raises `ConfigError` if others may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"TRITON_CACHE_DIR {folder} cannot be used ({error}): name a folder that can") from error
    if not is_private(found, os.geteuid()):
        raise ConfigError(
            f"TRITON_CACHE_DIR {folder} belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:o}: others "
            f"may write kernels there, which this process would run; name a folder of user {os.geteuid()} with mode 700"
        )


def is_private(folder: os.stat_result, user: int) -> bool:
    """Whether `user` alone may write to `folder`.

    The group with the user's number has no other member: pods have theirs, to which kubelets open volumes (fsGroup),
    and so have users of systems whose umask leaves files open to it. The group of root is not such a group.
    """
    own_group = user != 0 and folder.st_gid == user
    others = stat.S_IWOTH if own_group else stat.S_IWGRP | stat.S_IWOTH
    return folder.st_uid == user and not folder.st_mode & others


def key_of(src: Any, metadata: Mapping[str, Any]) -> str:
    """What a kernel was compiled for: a type for each argument, `/16` where a multiple of 16, or a value; options."""
    aligned = {place[0] for place, properties in src.attrs.items() if ["tt.divisibility", 16] in properties}
    values = {place[0]: value for place, value in src.constants.items()}
    arguments = [
        f"{name}={values[place]!r}" if place in values else f"{name}: {kind}{'/16' if place in aligned else ''}"
        for place, (name, kind) in enumerate(src.signature.items())
    ]
    return f"({', '.join(arguments)}), {metadata.get('num_warps')} warps, {metadata.get('num_stages')} stages"


COMPILED = CompileCounter()
"""Of this process."""
