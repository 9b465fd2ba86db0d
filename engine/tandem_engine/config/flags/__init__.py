"""The engine's command-line flags: one table for `tandem-engine serve`, `tandem worker` and `tandem up`.

    engine      the table: `add_engine_flags` ─▶ parsed ─▶ `engine_config`, or `engine_argv` for a child process
    cache, scheduler, adapters
                further groups of help: their flags, and the parts of `config` that they make
    other_engines
                flags of vLLM and SGLang, and what stands for them here
    types       what flags take, flags that other commands have too, and parsed flags as arguments again

Names follow SGLang and vLLM where they have one. Standard library and `config` only, so that a process
without torch can show, check and forward them.
"""

from tandem_engine.config.flags.engine import (
    AUTO_AFFINITY,
    NO_AFFINITY,
    add_engine_flags,
    engine_argv,
    engine_config,
    engine_flags,
)
from tandem_engine.config.flags.other_engines import about_other_engine
from tandem_engine.config.flags.types import (
    add_device_flag,
    add_kv_cache_dtype_flag,
    add_model_impl_flag,
    count,
    host_address,
    non_negative_int,
    positive_int,
    positive_mib,
)

__all__ = [
    "AUTO_AFFINITY",
    "NO_AFFINITY",
    "about_other_engine",
    "add_device_flag",
    "add_engine_flags",
    "add_kv_cache_dtype_flag",
    "add_model_impl_flag",
    "count",
    "engine_argv",
    "engine_config",
    "engine_flags",
    "host_address",
    "non_negative_int",
    "positive_int",
    "positive_mib",
]
