"""Engine settings as flags of `tandem worker`. Every field has its flag here; a test compares with the command.

`device` is resolved before (`builders.devices`): only a GPU is named, for engines run on a CPU unless told otherwise.
"""

from collections.abc import Iterator

import msgspec

from tandem_operator.api.engine import Engine, HostCache, Speculation, Transfer
from tandem_operator.builders.devices import Device

ENGINE_FLAGS = {
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "page_size": "--page-size",
    "context_length": "--context-length",
    "tensor_parallel_size": "--tensor-parallel-size",
    "nodes": "--nnodes",
    "mem_fraction_static": "--mem-fraction-static",
    "kv_cache_gib": "--kv-cache-gib",
    "max_running_requests": "--max-running-requests",
    "max_queued_requests": "--max-queued-requests",
    "chunked_prefill_size": "--chunked-prefill-size",
    "max_prefill_tokens": "--max-prefill-tokens",
    "schedule_policy": "--schedule-policy",
    "threads": "--threads",
}


def engine_flags(engine: Engine, transfer: Transfer, model_folder: str, *, device: Device) -> list[str]:
    """Flags of one worker, in a fixed order, so that equal settings give equal pods."""
    words = [] if device == "cpu" else ["--device", device]
    words += [word for field, flag in ENGINE_FLAGS.items() for word in _flag(flag, getattr(engine, field))]
    words += _speculation(engine.speculation, model_folder)
    words += _host_cache(engine.host_cache)
    words += ["--kv-digest", transfer.digest, "--expect-transport", transfer.expect]
    return words


def merged(common: Engine, own: Engine) -> Engine:
    """Settings of a role: its own where it has any. What sizes the KV pool is one setting in two forms."""
    if own.mem_fraction_static is not None or own.kv_cache_gib is not None:
        common = msgspec.structs.replace(common, mem_fraction_static=None, kv_cache_gib=None)
    chosen = {name: getattr(own, name) for name in own.__struct_fields__ if getattr(own, name) is not None}
    return msgspec.structs.replace(common, **chosen)


def _flag(flag: str, setting: object) -> Iterator[str]:
    if setting is not None:
        yield flag
        yield f"{setting:g}" if isinstance(setting, float) else str(setting)


def _speculation(speculation: Speculation | None, model_folder: str) -> Iterator[str]:
    if speculation is None:
        return
    yield from ("--speculative-algorithm", speculation.algorithm)
    if speculation.draft_model_path:
        yield from ("--speculative-draft-model-path", f"{model_folder}/{speculation.draft_model_path}")
    yield from _flag("--speculative-num-draft-tokens", speculation.num_draft_tokens)


def _host_cache(cache: HostCache | None) -> Iterator[str]:
    if cache is None:
        return
    if cache.size_gib is not None:
        yield "--enable-hierarchical-cache"
        yield from _flag("--hicache-size", cache.size_gib)
        yield from _flag("--hicache-write-policy", cache.write_policy)
    yield from _flag("--swap-space", cache.swap_gib)
