"""Defaults that follow from the device: tokens and requests per step, and the page size.

A GPU with the limits of a CPU is idle: its weights are read for 64 sequences where 256 would cost hardly more, and
chunks of a prompt are too short for its matrix products. Explicit flags are kept; `EngineConfig` lists the settings
without a flag, and only they change.

Pages of 64 tokens: the keys of a block of attention are in one page, so its addresses are computed once (prompts of
8,192 tokens on an H200: 438 TFLOP/s, 344 with pages of 16), and a transfer has a quarter of the descriptors.
"""

from dataclasses import dataclass, replace

from tandem_engine.config.engine import EngineConfig

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceDefaults:
    """Of one kind of device."""

    page_size: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    """Prompt tokens of a step in which nothing decodes."""
    mixed_prefill_tokens: int
    """Of a step in which something does: all decodes of the worker wait for as long as they take."""
    shared_prefill_tokens: int
    """Of a step while several tenants have requests."""
    max_running_requests: int
    default_context: int
    """A model's own maximum can be far larger than the pool."""

    def __str__(self) -> str:
        return (
            f"--page-size {self.page_size} --chunked-prefill-size {self.chunked_prefill_size} "
            f"--max-prefill-tokens {self.max_prefill_tokens} --mixed-prefill-tokens {self.mixed_prefill_tokens} "
            f"--shared-prefill-tokens {self.shared_prefill_tokens} "
            f"--max-running-requests {self.max_running_requests}, --context-length of at most {self.default_context}"
        )


OPEN_SETTINGS = (
    "page_size",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "mixed_prefill_tokens",
    "shared_prefill_tokens",
    "max_running_requests",
)
"""Flags without a default of their own; named as their settings."""


def device_defaults(memory_bytes: int) -> DeviceDefaults:
    """Of a GPU with so much memory."""
    if memory_bytes < 24 * GIB:
        chunk, whole, mixed, shared, rows, context = 2048, 2048, 512, 256, 128, 8192
    elif memory_bytes < 60 * GIB:
        chunk, whole, mixed, shared, rows, context = 4096, 8192, 1024, 256, 256, 16384
    else:
        chunk, whole, mixed, shared, rows, context = 8192, 16384, 2048, 512, 512, 32768
    return DeviceDefaults(
        page_size=64,
        chunked_prefill_size=chunk,
        max_prefill_tokens=whole,
        mixed_prefill_tokens=mixed,
        shared_prefill_tokens=shared,
        max_running_requests=rows,
        default_context=context,
    )


def with_device_defaults(config: EngineConfig, memory_bytes: int) -> EngineConfig:
    """`config` with the defaults of a GPU of this memory for what no flag gave. The same for a CPU.

    A bound that a flag gave bounds the others: no step is larger than `--max-tokens-per-step`.
    """
    if config.device == "cpu" or not config.left_open:
        return config
    found, scheduler = device_defaults(memory_bytes), config.scheduler
    values = {name: getattr(found, name) for name in OPEN_SETTINGS if name in config.left_open}
    page_size = values.pop("page_size", config.cache.page_size)
    if scheduler.max_tokens_per_step and "max_running_requests" in values:
        values["max_running_requests"] = min(found.max_running_requests, max(1, scheduler.max_tokens_per_step // 2))
    return replace(
        config,
        cache=replace(config.cache, page_size=page_size),
        scheduler=replace(scheduler, **values),
        default_context=found.default_context,
    )
