"""The engine's command-line flags: one table for `tandem-engine serve`, `tandem worker` and `tandem up`.

    engine      the table: `add_engine_flags` ─▶ parsed ─▶ `engine_config`, or `engine_argv` for a child process
    compute, parallel, cache, host, scheduler, operation, speculative, transfer, grammar
                one group of help each: its flags, and the part of `config` that they make
    shared      flags that other commands have too
    accuracy    the table of `tandem accuracy`
    values      what flags take; argv: parsed flags as arguments again

Names follow SGLang and vLLM where they have one. Standard library and `config` only, so that a process
without torch can show, check and forward them.
"""

from tandem_engine.flags.accuracy import accuracy_argv, add_accuracy_flags
from tandem_engine.flags.compute import AUTO_AFFINITY, NO_AFFINITY
from tandem_engine.flags.engine import add_engine_flags, engine_argv, engine_config
from tandem_engine.flags.shared import (
    add_device_flag,
    add_kv_cache_dtype_flag,
    add_model_impl_flag,
)
from tandem_engine.flags.values import host_address, non_negative_int, positive_int

__all__ = [
    "AUTO_AFFINITY",
    "NO_AFFINITY",
    "accuracy_argv",
    "add_accuracy_flags",
    "add_device_flag",
    "add_engine_flags",
    "add_kv_cache_dtype_flag",
    "add_model_impl_flag",
    "engine_argv",
    "engine_config",
    "host_address",
    "non_negative_int",
    "positive_int",
]
