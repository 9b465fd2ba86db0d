"""Structured output."""

import math
from dataclasses import dataclass

from tandem_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarConfig:
    """Structured output."""

    backend: str = "llguidance"
    """llguidance, or none to refuse requests with a grammar."""
    compile_timeout: float = 2.0
    """CPU seconds that one grammar may take to compile."""
    compile_memory_bytes: int = 128 << 20
    cache_size: int = 256
    """Compiled grammars that are kept, and as many refusals."""

    def __post_init__(self) -> None:
        if not 0.0 < self.compile_timeout < math.inf:
            raise ConfigError(f"--grammar-compile-timeout must be above 0, got {self.compile_timeout:g}")
        if self.cache_size < 1:
            raise ConfigError(f"--grammar-cache-size must be at least 1, got {self.cache_size}")
