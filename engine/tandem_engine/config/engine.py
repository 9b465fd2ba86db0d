"""An engine's whole configuration, and what is checked across its groups."""

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.adapters import AdapterConfig
from tandem_engine.config.cache import CacheConfig
from tandem_engine.config.model import ModelImpl
from tandem_engine.config.parallel import ParallelConfig
from tandem_engine.config.scheduler import PreemptionMode, SchedulerConfig
from tandem_engine.config.speculative import SpecConfig
from tandem_engine.config.transfer import DisaggConfig


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """Steps that a GPU runs again by one launch. Names follow SGLang flags."""

    enabled: bool = True
    max_rows: int = 0
    """Of the largest graph, a token of output each; 0 is what `--max-running-requests` can need, within bounds."""
    sizes: tuple[int, ...] = ()
    """Rows of each graph; () is a few up to the largest."""
    prompts: bool = True
    """Whether steps with prompts have graphs as well."""
    max_prompt_tokens: int = 0
    """Of the largest of these; 0 is what a step can have, within bounds."""
    prompt_sizes: tuple[int, ...] = ()
    """Tokens of each; () is a few up to the largest."""

    def __post_init__(self) -> None:
        self._check_prompts()
        if self.max_rows < 0:
            raise ConfigError(f"--cuda-graph-max-bs must be at least 1, got {self.max_rows}")
        if self.sizes and min(self.sizes) < 1:
            raise ConfigError(f"--cuda-graph-bs must be numbers of at least 1, got {min(self.sizes)}")
        if self.sizes and self.max_rows and min(self.sizes) > self.max_rows:
            raise ConfigError(
                f"--cuda-graph-max-bs {self.max_rows} leaves none of --cuda-graph-bs {' '.join(map(str, self.sizes))}"
            )

    def _check_prompts(self) -> None:
        most, sizes = self.max_prompt_tokens, self.prompt_sizes
        if most < 0:
            raise ConfigError(f"--cuda-graph-max-bs-prefill must be at least 1, got {most}")
        if sizes and min(sizes) < 1:
            raise ConfigError(f"--cuda-graph-bs-prefill must be numbers of at least 1, got {min(sizes)}")
        if sizes and most and min(sizes) > most:
            given = " ".join(map(str, sizes))
            raise ConfigError(f"--cuda-graph-max-bs-prefill {most} leaves none of --cuda-graph-bs-prefill {given}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationConfig:
    """What an operator may ask of a running engine, and where its files go."""

    torch_profiler_dir: str = ""
    """Traces are written here; empty refuses to trace."""
    crash_dump_folder: str = ""
    """State of a hang is written here; empty takes standard error."""


DEFAULT_CONTEXT = 4096
"""Context length when no flag asks for one: a model's own maximum can be far larger than the pool."""

DEVICES = re.compile(r"cpu|cuda(:\d{1,3})?")
"""What `--device` takes."""


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    """The safetensors files of the model directory."""
    DUMMY = "dummy"
    """Nowhere: random numbers of the shapes that config.json implies, to measure speed and memory."""


class AttentionLibrary(StrEnum):
    """What computes long prompts on a GPU. Names follow vLLM's backends."""

    AUTO = "auto"
    """The fastest, measured at start."""
    TRITON = "triton_attn"
    """The kernels of this repository, which compute everything else in any case."""
    SDPA = "torch_sdpa"
    FLASH = "flash_attn"
    FLASHINFER = "flashinfer"
    FLEX = "flex_attention"


class Quantization(StrEnum):
    """How projections are held in memory."""

    AUTO = "auto"
    """As the checkpoint stores them where a kernel of the device multiplies by that, in the model's dtype otherwise."""
    DEQUANTIZE = "dequantize"
    """In the model's dtype."""
    INT8 = "int8"
    """In eight bits with a scale for each output, whatever the device; plain weights are rounded as they are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an engine is built from."""

    model_path: str
    model_impl: ModelImpl = ModelImpl.AUTO
    load_format: LoadFormat = LoadFormat.AUTO
    dtype: str = "auto"
    """auto (the checkpoint's; bfloat16 on a GPU), float32 or bfloat16."""
    quantization: Quantization = Quantization.AUTO
    device: str = "cpu"
    threads: int = 0
    """Intra-op threads on a CPU, shared by all ranks; 0 takes one for each of `cpus`, or leaves torch's choice."""
    cpus: tuple[int, ...] = ()
    """Cores that the threads of forwards stay on; empty leaves them where the process may be."""
    context_length: int = 0
    """Longest prompt + output of one request; 0 takes the model's, at most `default_context`."""
    default_context: int = DEFAULT_CONTEXT
    left_open: tuple[str, ...] = ()
    """Settings that no flag gave: `device_defaults` may choose them."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    speculative: SpecConfig = field(default_factory=SpecConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    attention: AttentionLibrary = AttentionLibrary.AUTO
    operation: OperationConfig = field(default_factory=OperationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        if not DEVICES.fullmatch(self.device):
            raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {self.device!r}")
        if self.device == "cpu" and self.attention not in (AttentionLibrary.AUTO, AttentionLibrary.TRITON):
            raise ConfigError(f"--attention-backend {self.attention} needs a GPU: drop it, or set --device cuda")
        if 0 < len(self.cpus) < self.threads:
            raise ConfigError(
                f"--cpu-affinity names {len(self.cpus)} cores for --threads {self.threads}: name as many, or drop one"
            )
        policy = self.scheduler.schedule_policy
        if policy.by_prefix and not self.cache.enable_prefix_cache:
            raise ConfigError(
                f"--schedule-policy {policy} orders requests by what the prefix cache has for them, and "
                "--disable-radix-cache keeps nothing: drop one of the two"
            )
        if self.scheduler.preemption_mode is PreemptionMode.SWAP and not self.cache.host.swap_bytes:
            raise ConfigError("--preemption-mode swap needs host memory to swap to: set --swap-space")
        if self.parallel.tp_size > 1 and self.cache.host.storage_dir:
            raise ConfigError(
                f"--hicache-storage-dir needs --tensor-parallel-size 1, got {self.parallel.tp_size}: a file may be "
                "there for one rank and not for another. Drop it; host memory works with several ranks"
            )

    @property
    def most_rows(self) -> int:
        """Rows of logits that a step of decodes has, those of drafts included, at most."""
        drafts = 0 if self.speculative.algorithm is None else self.speculative.num_draft_tokens
        return self.scheduler.max_running_requests * (1 + drafts)

    @property
    def most_tokens(self) -> int:
        """That a step computes, at most."""
        return self.scheduler.max_prefill_tokens + self.most_rows
