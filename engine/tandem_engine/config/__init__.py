"""Configuration of an engine: frozen, validated once, passed down.

    model        the architecture, from a checkpoint's `config.json`; everything else comes from flags (`flags`)
    cache, host  the pool of KV pages, and memory below it
    scheduler    admission, batching, retraction
    transfer     KV between prefill and decode workers
    parallel     ranks and machines of one engine
    speculative, grammar, graphs, operation, adapters
    engine       all of them, and what must fit together
    device_defaults   what a GPU changes of what no flag gave

Nothing below reads the environment or argv.
"""

from tandem_engine.config.adapters import AdapterConfig, AdapterSource
from tandem_engine.config.cache import CacheConfig, HostConfig, KvCacheDtype, WritePolicy
from tandem_engine.config.device_defaults import OPEN_SETTINGS, DeviceDefaults, device_defaults, with_device_defaults
from tandem_engine.config.engine import (
    DEFAULT_CONTEXT,
    DEVICES,
    AttentionLibrary,
    EngineConfig,
    GrammarConfig,
    GraphConfig,
    LoadFormat,
    OperationConfig,
    Quantization,
)
from tandem_engine.config.model import (
    Activation,
    DeltaConfig,
    GateClamp,
    LatentConfig,
    ModelConfig,
    ModelImpl,
    MoeConfig,
    NormKind,
    NormPlacement,
    QkNorm,
    QueryScale,
    RopeConfig,
    Scoring,
    SharedExpert,
    StatePart,
    VariedConfig,
)
from tandem_engine.config.parallel import ParallelConfig
from tandem_engine.config.scheduler import PreemptionMode, SchedulePolicy, SchedulerConfig
from tandem_engine.config.speculative import MAX_DRAFT_TOKENS, SpecAlgorithm, SpecConfig
from tandem_engine.config.transfer import DisaggConfig, Role

__all__ = [
    "DEFAULT_CONTEXT",
    "DEVICES",
    "MAX_DRAFT_TOKENS",
    "OPEN_SETTINGS",
    "Activation",
    "AdapterConfig",
    "AdapterSource",
    "AttentionLibrary",
    "CacheConfig",
    "DeltaConfig",
    "DeviceDefaults",
    "DisaggConfig",
    "EngineConfig",
    "GateClamp",
    "GrammarConfig",
    "GraphConfig",
    "HostConfig",
    "KvCacheDtype",
    "LatentConfig",
    "LoadFormat",
    "ModelConfig",
    "ModelImpl",
    "MoeConfig",
    "NormKind",
    "NormPlacement",
    "OperationConfig",
    "ParallelConfig",
    "PreemptionMode",
    "QkNorm",
    "Quantization",
    "QueryScale",
    "Role",
    "RopeConfig",
    "SchedulePolicy",
    "SchedulerConfig",
    "Scoring",
    "SharedExpert",
    "SpecAlgorithm",
    "SpecConfig",
    "StatePart",
    "VariedConfig",
    "WritePolicy",
    "device_defaults",
    "with_device_defaults",
]
