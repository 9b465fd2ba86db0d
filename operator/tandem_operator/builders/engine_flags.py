"""Engine settings as flags of `tandem worker`, and the device that the workers of a role run on.

Every field of the settings has its flag here; a test compares them with the command.

    engine.device  auto (the default)  GPUs if `resources.limits` names some, else a CPU
                   cuda, cpu           as set; cuda without a GPU in the limits is rejected (`planning.validation`)

The device determines the flag `--device`, the image and the revision. The flag is set only for a GPU, because engines
run on a CPU by default. The device plugin alone selects the GPUs of a container: it sets NVIDIA_VISIBLE_DEVICES, and
none of our pods names it.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from tandem_operator.api.engine import Engine, HostCache, Lora, Sessions, Speculation, Storage, Transfer
from tandem_operator.api.pods import Resources
from tandem_operator.builders.containers import parse_quantity
from tandem_operator.builders.kv_storage import storage_folder

Device = Literal["cpu", "cuda"]

SHARED_GPU = "nvidia.com/gpu.shared"
"""A device plugin's name for a share of a GPU: by time slices, or by MPS."""

MIG = "nvidia.com/mig-"
"""Parts of a GPU with memory of their own, such as nvidia.com/mig-3g.40gb."""

OTHER_GPUS = ("amd.com/gpu", "gpu.intel.com/i915")


def gpus_of(resources: Resources) -> int:
    """GPUs of one pod, of any vendor; a share or a part of one counts as one."""
    return nvidia_gpus_of(resources) + sum(_count(resources, name) for name in OTHER_GPUS)


def nvidia_gpus_of(resources: Resources) -> int:
    """Those that an engine can run on."""
    return sum(_count(resources, name) for name in resources.limits if _is_nvidia(name))


def shares_gpu(resources: Resources) -> bool:
    """Whether others use the memory of its GPUs too."""
    return _count(resources, SHARED_GPU) > 0


def device_of(engine: Engine, resources: Resources) -> Device:
    """`engine`: as merged for one role."""
    if engine.device in ("cpu", "cuda"):
        return engine.device
    return "cuda" if nvidia_gpus_of(resources) else "cpu"


def nodes_of(engine: Engine, resources: Resources) -> int:
    """Pods of one worker. `engine`: as merged for one role."""
    if engine.nodes is not None:
        return engine.nodes
    ranks, gpus = engine.tensor_parallel_size or 1, gpus_of(resources)
    return ranks // gpus if gpus and ranks % gpus == 0 else 1


def _is_nvidia(name: str) -> bool:
    return name in ("nvidia.com/gpu", SHARED_GPU) or name.startswith(MIG)


def _count(resources: Resources, name: str) -> int:
    return int(parse_quantity(resources.limits.get(name, 0)))


ENGINE_FLAGS = {
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "model_impl": "--model-impl",
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
    "max_tokens_per_step": "--max-tokens-per-step",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "preemption_mode": "--preemption-mode",
    "schedule_policy": "--schedule-policy",
    "threads": "--threads",
}


def engine_flags(engine: Engine, transfer: Transfer, model_folder: str, *, device: Device) -> list[str]:
    """Flags of one worker, in a fixed order, so that equal settings give equal pods."""
    words = [] if device == "cpu" else ["--device", device]
    words += [word for field, flag in ENGINE_FLAGS.items() for word in _flag(flag, getattr(engine, field))]
    words += _speculation(engine.speculation, model_folder)
    words += _host_cache(engine.host_cache)
    words += _storage(engine.storage)
    words += _sessions(engine.sessions)
    words += _lora(engine.lora)
    words += ["--kv-digest", transfer.digest, "--expect-transport", transfer.expect]
    return words


def merged(common: Engine, own: Engine) -> Engine:
    """Settings of a role: its own where it has any. What sizes the KV pool is one setting in two forms."""
    if own.mem_fraction_static is not None or own.kv_cache_gib is not None:
        common = msgspec.structs.replace(common, mem_fraction_static=None, kv_cache_gib=None)
    settings = (name for name in own.__struct_fields__ if name != "args")
    chosen = {name: getattr(own, name) for name in settings if getattr(own, name) is not None}
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


def _storage(storage: Storage | None) -> Iterator[str]:
    if storage is None:
        return
    yield from ("--hicache-storage-dir", storage_folder(storage))
    yield from _flag("--hicache-storage-size", storage.size_gib)
    yield from _flag("--hicache-storage-prefetch-timeout", storage.wait_seconds)


def _sessions(sessions: Sessions | None) -> Iterator[str]:
    if sessions is None:
        return
    yield from _flag("--session-kv-gib", sessions.kv_gib)
    yield from _flag("--session-ttl", sessions.ttl_seconds)
    yield from _flag("--max-sessions", sessions.max)


def _lora(lora: Lora | None) -> Iterator[str]:
    if lora is None:
        return
    yield from _flag("--max-lora-rank", lora.max_lora_rank)
    yield from _flag("--max-cpu-loras", lora.max_cpu_loras)
    yield from _flag("--lora-turn", lora.turn_seconds)
