"""Memory below the device."""

import math
from dataclasses import dataclass
from enum import StrEnum

from tandem_engine.errors import ConfigError


class WritePolicy(StrEnum):
    """When a cached block is copied from the device to host memory."""

    WRITE_THROUGH = "write_through"
    """When it enters the cache."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When a later request is admitted with it in its prefix; what nobody comes back for is not copied."""
    WRITE_BACK = "write_back"
    """When the device evicts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    """Memory below the device: the slower tiers of the prefix cache, and room for swapped requests."""

    enable_cache: bool = False
    ratio: float = 2.0
    """Host pages of the cache per page of the device pool."""
    size_bytes: int = 0
    """Host memory of the cache; 0 sizes it by `ratio`."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    storage_dir: str = ""
    """Where blocks are kept below host memory; empty for nowhere."""
    storage_bytes: int = 16 << 30
    prefetch_timeout: float = 1.0
    """Seconds that a request waits at most for its prefix to be read from storage."""
    swap_bytes: int = 0
    """Host memory that the cache leaves to swapped requests; 0 swaps nothing."""

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio < math.inf:
            raise ConfigError(f"--hicache-ratio must be a number above 0, got {self.ratio}")
        for flag, value in (
            ("--hicache-size", self.size_bytes),
            ("--hicache-storage-size", self.storage_bytes),
            ("--swap-space", self.swap_bytes),
        ):
            if value < 0:
                raise ConfigError(f"{flag} must not be below 0 GiB, got {value / (1 << 30):g}")
        if not 0.0 <= self.prefetch_timeout < math.inf:
            raise ConfigError(
                f"--hicache-storage-prefetch-timeout must be a number of seconds from 0 on, got {self.prefetch_timeout}"
            )
        if self.storage_dir and not self.enable_cache:
            raise ConfigError(
                f"--hicache-storage-dir {self.storage_dir} stores what leaves host memory: it needs "
                "--enable-hierarchical-cache"
            )

    @property
    def enabled(self) -> bool:
        """Whether there is any host memory at all."""
        return self.enable_cache or self.swap_bytes > 0

    def cache_pages(self, *, device_pages: int, page_bytes: int) -> int:
        """Host pages of the cache. Raises `ConfigError` when `size_bytes` holds not one."""
        if not self.enable_cache:
            return 0
        pages = self.size_bytes // page_bytes if self.size_bytes else int(self.ratio * device_pages)
        if pages < 1:
            size = f"--hicache-size {self.size_bytes / (1 << 30):g}"
            given = size if self.size_bytes else f"--hicache-ratio {self.ratio}"
            raise ConfigError(f"{given} holds not one KV page of {page_bytes} bytes: raise it")
        return pages

    def swap_pages(self, page_bytes: int) -> int:
        """Host pages reserved for swapping. Raises `ConfigError` when `swap_bytes` holds not one."""
        if self.swap_bytes and self.swap_bytes < page_bytes:
            raise ConfigError(
                f"--swap-space {self.swap_bytes / (1 << 30):g} holds not one KV page of {page_bytes} bytes: raise it"
            )
        return self.swap_bytes // page_bytes
