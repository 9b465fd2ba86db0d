"""The only place of the engine that reads the process environment, once at start, and that sets it for libraries."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_lock = threading.Lock()
"""To another thread a temporary default would look like the user's, and be gone before a library has read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Settings that have no flag because they concern how the process runs, not what it serves."""

    log_level: str
    """TANDEM_LOG_LEVEL: debug, info (default), warning, error."""
    ucx_tls: str
    """UCX_TLS: the transports that UCX may use (default all)."""
    ucx_net_devices: str = ""
    """UCX_NET_DEVICES: the network interfaces and devices that UCX may use; "" if the variable is not set."""

    @property
    def level(self) -> int:
        """`log_level` as logging has it."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def read_environment() -> Environment:
    """Read the environment of this process, as its user has set it."""
    with _lock:
        return Environment(
            log_level=os.environ.get("TANDEM_LOG_LEVEL", "info").lower(),
            ucx_tls=os.environ.get("UCX_TLS", "all"),
            ucx_net_devices=os.environ.get("UCX_NET_DEVICES", ""),
        )


KERNEL_VARIABLES = (
    "TANDEM_CACHE_DIR",
    "TANDEM_KERNELS_PATH",
    "TANDEM_KERNEL_TARGET",
    "ATEN_CPU_CAPABILITY",
    "XDG_CACHE_HOME",
)


def kernel_environment() -> dict[str, str]:
    """Those of `KERNEL_VARIABLES` that are set: what kernels of a CPU are compiled for, and where they are kept."""
    with _lock:
        return {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}


def environment_with(changes: Mapping[str, str]) -> dict[str, str]:
    """For a process to be started: the environment of this one, but for `changes`."""
    with _lock:
        return {**os.environ, **changes}


def set_default(name: str, value: str) -> None:
    """Give a third-party library (UCX, NIXL, OpenMP) a default that the user's environment overrides."""
    os.environ.setdefault(name, value)


@contextlib.contextmanager
def defaults_while(defaults: Mapping[str, str]) -> Iterator[None]:
    """The same for as long as the library reads them: processes that are started later inherit nothing.

    One thread at a time: others wait, with `read_environment` too.
    """
    with _lock:
        missing = {name: value for name, value in defaults.items() if name not in os.environ}
        os.environ.update(missing)
        try:
            yield
        finally:
            for name in missing:
                del os.environ[name]


# Memory that oneDNN keeps: its products are compiled for each shape of weights and each number of rows.
#
# Two caches hold the same compiled products, oneDNN's and one in torch, each of 1,024 by default. A worker that serves
# batches of every size fills them: 0.6 GiB, which no step of its start has taken yet.

KEPT_PRODUCTS = 256
"""Capacity of each cache. The products of a decoder fit: 36 numbers of rows up to 512 tokens, of seven shapes."""

PRODUCT_BYTES = 640 << 10
"""Of one product, at most: measured in float32 with AVX512."""

KEPT_BYTES = KEPT_PRODUCTS * PRODUCT_BYTES


def limit_products() -> None:
    """Set both capacities, unless the user's environment does. Takes effect before this process's first product."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        set_default(variable, str(KEPT_PRODUCTS))
