"""The paged KV pool: its size, and what its pages hold."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem_engine.config.host import HostConfig
from tandem_engine.errors import ConfigError

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
        if device == "cpu" or any(self._sizes().values()):
            return self
        return replace(self, mem_fraction_static=DEFAULT_ACCELERATOR_SHARE)

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
