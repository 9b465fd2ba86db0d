"""The paged KV pool: its size, and what its pages hold."""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem_engine.base.errors import ConfigError


class WritePolicy(StrEnum):
    """When a cached block is copied from the device to host memory."""

    WRITE_THROUGH = "write_through"
    """When it enters the cache."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When a later request is admitted with it in its prefix; a prefix that no later request uses is not copied."""
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


DEFAULT_KV_BYTES = 512 << 20
"""For KV pages on a CPU when no flag says anything: enough to try things out, and nothing to measure for."""

DEFAULT_ACCELERATOR_SHARE = 0.88
"""The rest is for what a device's libraries take beside torch."""


class KvCacheDtype(StrEnum):
    """Of KV pages. Names follow vLLM."""

    AUTO = "auto"
    """The model's."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"
    """fp8_e4m3."""
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV pool."""

    page_size: int = 16
    dtype: KvCacheDtype = KvCacheDtype.AUTO
    num_pages: int = 0
    """Pages of the pool, dummy page 0 included. At most one of this and the next two is set."""
    kv_cache_bytes: int = 0
    """Memory for pages."""
    mem_fraction_static: float = 0.0
    """Share of the device's memory that this engine may have in all: weights, the largest step, and pages."""
    enable_prefix_cache: bool = True
    session_bytes: int = 0
    """KV that conversations may pin between their turns; 0 is a quarter of the pool."""
    host: HostConfig = field(default_factory=HostConfig)

    def __post_init__(self) -> None:
        if self.host.enable_cache and not self.enable_prefix_cache:
            raise ConfigError("--enable-hierarchical-cache extends the prefix cache: it excludes --disable-radix-cache")
        if self.page_size < 1:
            raise ConfigError(f"--page-size must be at least 1, got {self.page_size}")
        if self.num_pages != 0 and self.num_pages < 2:
            raise ConfigError(f"--num-pages must be at least 2 (page 0 is reserved), got {self.num_pages}")
        if self.kv_cache_bytes < 0:
            raise ConfigError(f"--kv-cache-gib must be above 0, got {self.kv_cache_bytes / (1 << 30):g}")
        if not 0 <= self.session_bytes < 1 << 62:
            raise ConfigError(f"--session-kv-gib must not be below 0, got {self.session_bytes / (1 << 30):g}")
        if not 0.0 <= self.mem_fraction_static <= 1.0:
            raise ConfigError(f"--mem-fraction-static must be above 0 and at most 1, got {self.mem_fraction_static:g}")
        given = [flag for flag, value in self._sizes().items() if value]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both size the KV pool: give one of them")

    def session_pages(self, page_bytes: int, *, num_pages: int) -> int:
        """Pages that conversations may pin in a pool of `num_pages`."""
        return self.session_bytes // page_bytes if self.session_bytes else num_pages // 4

    def _sizes(self) -> dict[str, float]:
        return {
            "--num-pages": self.num_pages,
            "--kv-cache-gib": self.kv_cache_bytes,
            "--mem-fraction-static": self.mem_fraction_static,
        }

    def for_device(self, device: str) -> "CacheConfig":
        """With a share of an accelerator's memory, which is there to be used, when nothing else is asked for."""
        if device == "cpu" or not self.is_default_size:
            return self
        return replace(self, mem_fraction_static=DEFAULT_ACCELERATOR_SHARE)

    @property
    def is_default_size(self) -> bool:
        """Whether nothing sizes the pool."""
        return not any(self._sizes().values())

    @property
    def kv_bytes(self) -> int:
        """Memory for pages when neither their number nor a fraction is given."""
        return self.kv_cache_bytes or DEFAULT_KV_BYTES

    def pages_for(self, page_bytes: int) -> int:
        """Pages of the pool when one page takes `page_bytes`. Raises `ConfigError` when not even two fit."""
        pages = self.num_pages or self.kv_bytes // page_bytes
        if pages < 2:
            raise ConfigError(
                f"--kv-cache-gib {self.kv_bytes / (1 << 30):g} holds fewer than 2 pages of {page_bytes} bytes: raise it"
            )
        return pages
