"""Configuration of an engine: frozen, validated once, passed down.

`ModelConfig` comes from a checkpoint's `config.json` (see `model.checkpoint`); everything else
comes from flags. Nothing below reads the environment or argv.
"""

import math
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tandem_engine.errors import ConfigError
from tandem_engine.names import DigestKind, LinkTransport

DEFAULT_CONTEXT = 4096
"""Context length when no flag asks for one: a model's own maximum can be far larger than the pool."""

MAX_DRAFT_TOKENS = 15
"""With the token before them, what the paged attention kernel takes as one run (`LONGEST_CHAIN`)."""
MAX_LOOKUP_TOKENS = 32


DEFAULT_KV_BYTES = 512 << 20
"""For KV pages on a CPU when no flag says anything: enough to try things out, and nothing to measure for."""
DEVICES = re.compile(r"cpu|cuda(:\d{1,3})?")
INIT_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
"""What `--device` takes."""
DEFAULT_ACCELERATOR_SHARE = 0.88
"""The rest is for what a device's libraries take beside torch."""


class SchedulePolicy(StrEnum):
    """In which order waiting requests are admitted (docs/scheduling.md)."""

    FCFS = "fcfs"
    LPM = "lpm"
    DFS_WEIGHT = "dfs-weight"
    PRIORITY = "priority"
    SRF = "srf"

    @property
    def by_prefix(self) -> bool:
        """Whether it looks at the prefix cache."""
        return self in (SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT)


class Role(StrEnum):
    """What a worker is offered by the router. The engine itself can always do either."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WritePolicy(StrEnum):
    """When a cached block is copied from the device to host memory."""

    WRITE_THROUGH = "write_through"
    """When it enters the cache."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When a later request is admitted with it in its prefix; what nobody comes back for is not copied."""
    WRITE_BACK = "write_back"
    """When the device evicts it."""


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


class PreemptionMode(StrEnum):
    """What becomes of the KV of a request that is retracted."""

    AUTO = "auto"
    """Whichever is predicted to be cheaper, from measured rates."""
    RECOMPUTE = "recompute"
    SWAP = "swap"
    """Recomputed all the same where host memory has no room, or while its prompt is still being computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters as in Hugging Face `rope_parameters` / `rope_scaling`."""

    rope_type: str = "default"
    """default, linear, dynamic, llama3 or yarn."""
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelImpl(StrEnum):
    """Who computes a model."""

    AUTO = "auto"
    """Tandem where it knows the architecture, transformers otherwise."""
    TANDEM = "tandem"
    TRANSFORMERS = "transformers"
    """The model code of transformers, with attention over our pages."""


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    """The safetensors files of the model directory."""
    DUMMY = "dummy"
    """Nowhere: random numbers of the shapes that config.json implies, to measure speed and memory."""


class Quantization(StrEnum):
    """How projections are held in memory."""

    AUTO = "auto"
    """As the checkpoint stores them where a kernel of the device multiplies by that, in the model's dtype otherwise."""
    DEQUANTIZE = "dequantize"
    """In the model's dtype."""
    INT8 = "int8"
    """In eight bits with a scale for each output, whatever the device; plain weights are rounded as they are read."""


class Activation(StrEnum):
    """Of the gate in a feed-forward block."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU by its tanh approximation."""


class NormKind(StrEnum):
    """What a stored norm weight w means, and when it is rounded."""

    PLAIN = "plain"
    """Scale by w, after rounding to the model's dtype (Llama)."""
    UNIT_OFFSET = "unit_offset"
    """Scale by 1 + w in float32, then round (Gemma)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Mixture of experts in place of the feed-forward block."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalise: bool
    """Whether the weights of a token's chosen experts are scaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers that keep an ordinary feed-forward block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a decoder, independent of its family's spelling of field names.

    When transformers computes it, only sizes, context, ids and dtype mean anything; the rest is its business.
    """

    family: str
    """The `model_type` of transformers."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    impl: ModelImpl = ModelImpl.TANDEM
    attention_bias: bool = False
    """Bias on q, k and v (qwen2 always; llama when `attention_bias`)."""
    output_bias: bool = False
    """Bias on o_proj (llama when `attention_bias`)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on q and k (qwen3, gemma3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer, how many tokens a token sees, itself included; None is all. () when no layer has a window."""
    local_rope: RopeConfig | None = None
    """Rotary parameters of `local_layers`, where layers differ (gemma3)."""
    local_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    """Factor of attention scores; None is 1 / √head_dim."""
    attention_soft_cap: float | None = None
    """Bound of attention scores (gemma2)."""
    logit_soft_cap: float | None = None
    """Bound of the output logits (gemma2)."""
    embedding_scale: float = 1.0
    """Factor of the embeddings (gemma: √hidden_size)."""
    activation: Activation = Activation.SILU
    norm: NormKind = NormKind.PLAIN
    sandwich_norms: bool = False
    """Norms after attention and after the feed-forward block too, before each is added (gemma)."""
    moe: MoeConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """dtype that the checkpoint declares: float32, bfloat16 or float16."""
    quantization: str = ""
    """How the checkpoint stores its matrices and how they are held; empty: as they are, in the dtype."""
    fingerprint: str = ""
    """Digest of config and weight headers: two workers with different ones never exchange KV."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Admission, batching and retraction. Names follow SGLang and vLLM flags."""

    context_length: int = 2048
    """Longest prompt + output of one request, in tokens."""
    max_running_requests: int = 64
    max_queued_requests: int = 1024
    max_tokens_per_step: int = 0
    """Token budget that running requests, one token each, and prompts share; 0 is the sum of their own limits."""
    max_prefill_tokens: int = 2048
    """Token budget of the EXTEND part of one step."""
    chunked_prefill_size: int = 512
    """Longest run of prompt tokens one request may compute in one step."""
    long_prefill_token_threshold: int = 0
    """While others decode, a prompt with more tokens left than this computes only so many in a step; 0 is off."""
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    policy_ageing_seconds: float = 30.0
    """What nobody has to fear: see the policies for what waiting this long is worth."""
    priority_preemption_threshold: int = 10
    """How much greater a waiting request's priority must be to put a running one back (policy priority)."""
    watermark: float = 0.01
    """Share of the pool's pages that admission leaves free, so that requests just admitted can grow."""
    enable_mixed_chunk: bool = True
    """Let running decodes join a step that prefills."""
    enable_overlap: bool = True
    """Schedule step N+1 while step N computes."""
    init_new_token_ratio: float = 0.7
    """Share of a request's remaining output that admission reserves, at start and after a retraction."""
    min_new_token_ratio: float = 0.1
    new_token_ratio_decay_steps: int = 600
    max_sessions: int = 1024
    """Conversations kept at a time."""
    session_ttl: float = 600.0
    """Seconds that an unused conversation is kept."""
    max_retractions: int = 16
    """A request retracted more often than this fails instead of looping for ever (T12)."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    """Of retracted requests, if there is swap space at all."""
    force_retract_every: int = 0
    """Tests only: retract the newest running request every N decode steps. 0 is never."""
    force_fault_every: int = 0
    """Tests only: every N-th step with more than one sequence computes and then raises. 0 is never."""
    watchdog_timeout: float = 120.0
    """Seconds after which a step that has not come back is taken for hung."""
    audit_every_step: bool = False
    """Run the conservation audit after each step, not only when idle."""

    def __post_init__(self) -> None:
        for name in (
            "context_length",
            "max_running_requests",
            "max_queued_requests",
            "max_sessions",
            "max_prefill_tokens",
            "chunked_prefill_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.session_ttl < float("inf"):
            raise ConfigError(f"--session-ttl must be a number of seconds above 0, got {self.session_ttl}")
        if 0 < self.max_tokens_per_step <= self.max_running_requests:
            raise ConfigError(
                f"--max-tokens-per-step {self.max_tokens_per_step} leaves no token for prompts beside "
                f"--max-running-requests {self.max_running_requests}: raise it to at least "
                f"{self.max_running_requests + 1}"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"--long-prefill-token-threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )
        if not (0.0 < self.policy_ageing_seconds < math.inf):
            raise ConfigError(f"--policy-ageing-seconds must be above 0, got {self.policy_ageing_seconds:g}")
        if self.priority_preemption_threshold < 1:
            raise ConfigError(
                f"--priority-preemption-threshold must be at least 1, got {self.priority_preemption_threshold}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"--watermark must be at least 0 and below 1, got {self.watermark:g}")
        if not self.watchdog_timeout > 0:
            raise ConfigError(f"--watchdog-timeout must be more than 0 seconds, got {self.watchdog_timeout}")
        if not 0.0 < self.min_new_token_ratio <= self.init_new_token_ratio <= 1.0:
            raise ConfigError(
                "new token ratios must satisfy 0 < min <= init <= 1, got "
                f"min {self.min_new_token_ratio} and init {self.init_new_token_ratio}"
            )

    def prefill_budget(self, *, decodes: int) -> int:
        """Prompt tokens that fit in a step beside `decodes` tokens of running requests: always at least one."""
        whole = self.max_tokens_per_step or self.max_prefill_tokens + self.max_running_requests
        return min(self.max_prefill_tokens, max(1, whole - decodes))

    def chunk_limit(self, *, decodes: int) -> int:
        """Longest run of prompt tokens of one request in a step that `decodes` running requests take part in."""
        if not (decodes and self.long_prefill_token_threshold):
            return self.chunked_prefill_size
        return min(self.chunked_prefill_size, self.long_prefill_token_threshold)


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
class DisaggConfig:
    """Prefill/decode transfer. All durations are seconds of monotonic time.

    Grants and kept prompts are leases: a peer that is alive renews them every `renewal_period`, so a queue
    may be as long as requests' own deadlines allow, and only silence lets them run out. Workers that
    exchange KV should agree on the timeouts, or the shorter lease may lapse between two renewals.
    """

    role: Role = Role.BOTH
    transport: str = "nixl"
    """nixl, or none when the worker only ever serves alone."""
    peer_group: str = ""
    """KV is exchanged with engines of the same group alone: a deployment gives each of its revisions one."""
    grant_timeout: float = 8.0
    """Decode waits this long without a sign of life from the writer, before or after the grant. Prefill lets
    a push take as long."""
    hold_timeout: float = 8.0
    """Prefill keeps finished pages this long for a grant, or for word that decode still waits for memory."""
    drain_timeout: float = 5.0
    """After an abort decode waits this long for the writer's drain-ack before it quarantines the pages."""
    stall_timeout: float = 10.0
    """A decode engine in which nothing has moved for this long lets go of the finished prompts that wait for its
    memory: the way out when engines wait for each other in a circle."""

    prefix_fetch_timeout: float = 2.0
    """A request waits no longer than this for a prefix that another worker has, and less where that would not pay."""

    kv_digest: DigestKind = DigestKind.SAMPLED
    """The proof that a worker asks of the pages it is sent."""
    expect_transport: LinkTransport | None = None
    """What links to peers should be carried by, or better. None expects nothing."""
    link_probe_mib: int = 16
    """Largest write of a link's self-test. 0 measures only what requests move."""
    kv_push_layers: int | None = None
    """Layers that prefill sends at once while later ones compute; 0 sends pages once their chunk is settled. None
    goes by bytes: see `disaggregation.prefill.WRITE_BYTES`."""

    @property
    def renewal_period(self) -> float:
        """Seconds between two signs of life: three may be lost before a lease runs out."""
        return min(self.grant_timeout, self.hold_timeout) / 4

    @property
    def question_period(self) -> float:
        """Seconds between two questions about a grant whose end was not heard of."""
        return self.renewal_period / 4

    def __post_init__(self) -> None:
        if not 0.0 < self.prefix_fetch_timeout < math.inf:
            raise ConfigError(
                f"--prefix-fetch-timeout must be a positive number of seconds, got {self.prefix_fetch_timeout}"
            )


class SpecAlgorithm(StrEnum):
    """Who proposes drafts."""

    NGRAM = "NGRAM"
    """What followed the last tokens when they occurred before."""
    DRAFT = "DRAFT"
    """A smaller model of the same vocabulary."""
    EAGLE = "EAGLE"
    """A head of one layer over the model's own hidden states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecConfig:
    """Speculative decoding. Names follow SGLang and vLLM flags."""

    algorithm: SpecAlgorithm | None = None
    """None decodes one token per step."""
    draft_model_path: str = ""
    """Checkpoint folder of the draft model or head."""
    num_draft_tokens: int = 4
    """Drafts that a request takes in one step at most."""
    prompt_lookup_min: int = 2
    """Tokens that must repeat before n-gram lookup proposes."""
    prompt_lookup_max: int = 4
    """Tokens of context by which n-gram lookup chooses between repetitions."""
    disable_by_batch_size: int = 0
    """No drafts in steps with more running requests than this: they are busy enough. 0 is no bound."""
    adaptive: bool = True
    """Fit each request's draft length to its acceptance, none at all included."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"--speculative-num-draft-tokens must be between 1 and {MAX_DRAFT_TOKENS}, got {self.num_draft_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP_TOKENS:
            raise ConfigError(
                "--ngram-prompt-lookup-min and -max must satisfy "
                f"1 <= min <= max <= {MAX_LOOKUP_TOKENS}, got {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )
        if self.needs_draft_model and not self.draft_model_path:
            raise ConfigError(
                f"--speculative-algorithm {self.algorithm} needs --speculative-draft-model-path, "
                "the folder of the draft's weights"
            )
        if self.draft_model_path and not self.needs_draft_model:
            raise ConfigError(
                "--speculative-draft-model-path has a use with --speculative-algorithm "
                f"{SpecAlgorithm.DRAFT} or {SpecAlgorithm.EAGLE} alone, which is {self.algorithm or 'not given'}"
            )

    @property
    def needs_draft_model(self) -> bool:
        return self.algorithm in (SpecAlgorithm.DRAFT, SpecAlgorithm.EAGLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many processes share one engine's model, and on how many machines (nodes)."""

    tp_size: int = 1
    """Ranks that each hold a part of every layer."""
    timeout: float = 120.0
    """Seconds that a rank waits for another: at start, and within a model step."""
    nnodes: int = 1
    """Machines, with as many ranks each."""
    node_rank: int = 0
    """Which of them this is. Node 0 leads: it has rank 0."""
    dist_init_addr: str = ""
    """host:port at which node 0 is reached by the others, the same text on all of them."""
    init_timeout: float = 600.0
    """Seconds that nodes wait for each other at start."""

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be at least 1, got {self.tp_size}")
        for flag, seconds in (("--dist-timeout", self.timeout), ("--dist-init-timeout", self.init_timeout)):
            if not 0.0 < seconds < float("inf"):
                raise ConfigError(f"{flag} must be a number of seconds above 0, got {seconds:g}")
        self._check_nodes()

    def _check_nodes(self) -> None:
        if self.nnodes < 1 or self.tp_size % self.nnodes:
            raise ConfigError(
                f"--nnodes must be at least 1 and divide --tensor-parallel-size {self.tp_size}, got {self.nnodes}: "
                "each node has as many ranks"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank must be below --nnodes {self.nnodes}, from 0 upwards, got {self.node_rank}")
        if self.nnodes > 1 and not INIT_ADDRESS.fullmatch(self.dist_init_addr):
            raise ConfigError(
                f"--dist-init-addr must be HOST:PORT of node 0 with --nnodes {self.nnodes}, got {self.dist_init_addr!r}"
            )
        if self.nnodes == 1 and self.dist_init_addr:
            raise ConfigError(f"--dist-init-addr {self.dist_init_addr} needs --nnodes above 1")

    @property
    def local_size(self) -> int:
        """Ranks of each node."""
        return self.tp_size // self.nnodes

    def local_rank(self, rank: int) -> int:
        """Which of its node's ranks `rank` is."""
        return rank % self.local_size

    def ranks_of(self, node_rank: int) -> range:
        """Ranks of a node."""
        return range(node_rank * self.local_size, (node_rank + 1) * self.local_size)

    @property
    def init_port(self) -> int:
        """Of `dist_init_addr`."""
        return int(self.dist_init_addr.rpartition(":")[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """Decode steps that a GPU runs again without being told each operation. Names follow SGLang flags."""

    enabled: bool = True
    max_rows: int = 0
    """Of the largest graph, a token of output each; 0 is what `--max-running-requests` can need, within bounds."""
    sizes: tuple[int, ...] = ()
    """Rows of each graph; () is a few up to the largest."""

    def __post_init__(self) -> None:
        if self.max_rows < 0:
            raise ConfigError(f"--cuda-graph-max-bs must be at least 1, got {self.max_rows}")
        if self.sizes and min(self.sizes) < 1:
            raise ConfigError(f"--cuda-graph-bs must be numbers of at least 1, got {min(self.sizes)}")
        if self.sizes and self.max_rows and min(self.sizes) > self.max_rows:
            raise ConfigError(
                f"--cuda-graph-max-bs {self.max_rows} leaves none of --cuda-graph-bs {' '.join(map(str, self.sizes))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationConfig:
    """What an operator may ask of a running engine, and where its files go."""

    torch_profiler_dir: str = ""
    """Traces are written here; empty refuses to trace."""
    crash_dump_folder: str = ""
    """State of a hang is written here; empty takes standard error."""


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
    """Longest prompt + output of one request; 0 takes the model's, at most `DEFAULT_CONTEXT`."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    disagg: DisaggConfig = field(default_factory=DisaggConfig)
    speculative: SpecConfig = field(default_factory=SpecConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    operation: OperationConfig = field(default_factory=OperationConfig)

    def __post_init__(self) -> None:
        if not DEVICES.fullmatch(self.device):
            raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {self.device!r}")
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
