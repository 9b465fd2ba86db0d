"""Settings of the engine: each is a flag of `tandem worker`, and unset ones have that flag's default.

`builders.engine_flags` names the flags, `tandem worker --help-all` explains them, and docs/features.md says what
goes with what.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.types import (
    AbsolutePath,
    Api,
    Arguments,
    ExtendedResource,
    LabelKey,
    Name,
    RelativePath,
    Rule,
    Share,
    printable,
    within_folder,
)

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
GiB = Annotated[float, msgspec.Meta(gt=0.0, le=65536.0)]


class Speculation(Api, frozen=True, kw_only=True):
    """Draft tokens and verify several in one step. Never changes an output."""

    algorithm: Literal["NGRAM", "DRAFT", "EAGLE"]
    """Source of drafts. NGRAM: what followed the same tokens earlier; DRAFT: a smaller model; EAGLE: a trained head."""
    draft_model_path: Annotated[str, printable(max_length=1024)] = ""
    """Directory of the draft model or head within the model's volume; required by DRAFT and EAGLE."""
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Maximum number of draft tokens per request and step."""

    RULES: ClassVar = (
        within_folder("draftModelPath"),
        Rule(
            "self.algorithm == 'NGRAM' || has(self.draftModelPath)",
            "draftModelPath is needed by DRAFT and EAGLE",
        ),
    )


class HostCache(Api, frozen=True, kw_only=True):
    """Host memory below the device's KV cache."""

    size_gib: GiB | None = None
    """Memory for prefixes that the KV pool evicts, in GiB."""
    write_policy: Literal["write_through", "write_through_selective", "write_back"] | None = None
    """Time at which a prefix is copied there."""
    swap_gib: GiB | None = None
    """Memory for the KV of retracted requests, in GiB."""


class Storage(Api, frozen=True, kw_only=True):
    """Files below the host memory, for prefixes that it evicts; `hostCache.sizeGib` and one rank are required."""

    claim_name: Name | None = None
    """PersistentVolumeClaim for the files, which then outlive pods; ReadWriteMany where workers are on several nodes.
    Without it each pod has an empty volume."""
    path: RelativePath | None = None
    """Directory within that volume; default: its root. Workers may share it."""
    directory: AbsolutePath | None = None
    """Directory of a volume of `pod.hostPaths` or `pod.patch`, instead of a claim or an empty volume."""
    size_gib: GiB | None = None
    """Limit of the files of each worker in GiB, 16 by default. The least recently used are deleted first. A directory
    that workers share takes up to the sum of their limits."""
    wait_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] | None = None
    """Seconds that a request waits for its prefix to be read, 1 by default."""

    RULES: ClassVar = (
        within_folder("directory"),
        Rule(
            "!(has(self.directory) && (has(self.claimName) || has(self.path)))",
            "directory is on a volume of the pod: remove claimName and path",
        ),
    )


class Sessions(Api, frozen=True, kw_only=True):
    """KV of conversations that workers keep between requests with a session id."""

    kv_gib: GiB | None = None
    """Memory for the KV of sessions, in GiB."""
    ttl_seconds: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)] | None = None
    """Seconds that an idle session is kept."""
    max: PositiveInt | None = None
    """Maximum number of sessions of a worker."""


class Lora(Api, frozen=True, kw_only=True):
    """Limits of LoRA adapters."""

    max_lora_rank: PositiveInt | None = None
    """Largest rank of an adapter, 64 by default."""
    max_cpu_loras: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    """Maximum number of adapters in a worker's memory, 256 by default. The least recently used makes way."""
    turn_seconds: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] | None = None
    """With more adapters in use than that: seconds that one is used before it makes way, 2 by default."""


class Engine(Api, frozen=True, kw_only=True):
    """Engine settings."""

    device: Literal["auto", "cpu", "cuda"] | None = None
    """Device of the workers; auto: the NVIDIA GPUs in `resources.limits` of the role, else a CPU. Both roles should
    have the same device; otherwise set `dtype`."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Type of weights, and of KV unless `kvCacheDtype` is set."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Type of KV pages. The same for all roles: workers exchange pages only with workers of the same type."""
    quantization: Literal["auto", "dequantize", "int8"] | None = None
    """Form of quantized checkpoints in memory, or of all checkpoints with int8."""
    model_impl: Literal["auto", "tandem", "transformers"] | None = None
    """Code that computes the model: Tandem's own layers, or those of transformers."""
    page_size: Annotated[int, msgspec.Meta(extra_json_schema={"enum": [1, 16, 64]}, ge=1, le=64)] | None = None
    """Tokens per KV page: 1, 16 or 64."""
    context_length: PositiveInt | None = None
    """Longest prompt plus output; at most the model's context."""
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """GPUs (ranks) of one worker. Must divide the model's attention heads."""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Pods that share the ranks of one worker, with the same number on each; default: as many as the GPUs of one pod
    require. More than one requires the LeaderWorkerSet API in the cluster."""
    mem_fraction_static: Share | None = None
    """Share of device memory for weights and KV. If pods share a GPU: the share of this worker; all shares together
    at most about 0.9."""
    kv_cache_gib: GiB | None = None
    """Memory for KV pages in GiB, instead of a share. Set for a role, it replaces a share set for both roles."""
    max_running_requests: PositiveInt | None = None
    """Maximum number of sequences in one decode batch."""
    max_queued_requests: PositiveInt | None = None
    """Maximum number of waiting requests of a worker; more are rejected."""
    chunked_prefill_size: PositiveInt | None = None
    """Maximum number of prompt tokens of one request in one step."""
    max_prefill_tokens: PositiveInt | None = None
    """Maximum number of prompt tokens in one step."""
    max_tokens_per_step: PositiveInt | None = None
    """Maximum number of tokens in one step, of prompts and outputs together."""
    long_prefill_token_threshold: PositiveInt | None = None
    """Maximum number of prompt tokens in one step of a request whose prompt is longer than this."""
    preemption_mode: Literal["auto", "recompute", "swap"] | None = None
    """What happens to the KV of a request that is preempted for lack of memory."""
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "priority", "srf"] | None = None
    """Order of waiting requests."""
    threads: PositiveInt | None = None
    """CPU threads of one worker, if the model runs on a CPU."""
    speculation: Speculation | None = None
    """Speculative decoding."""
    host_cache: HostCache | None = None
    """Host memory below the KV cache."""
    storage: Storage | None = None
    """Files below the host memory."""
    sessions: Sessions | None = None
    """KV of conversations."""
    lora: Lora | None = None
    """LoRA adapters. Those of a role replace the common ones."""
    args: Arguments = []
    """Further flags of `tandem worker`, each one word: --flag or --flag=value. An init container checks them before a
    worker starts. Flags that have a field, and those that the operator sets, are rejected. Flags of a role are added
    to the common ones, and replace those of the same name."""

    RULES: ClassVar = (
        Rule(
            "!(has(self.memFractionStatic) && has(self.kvCacheGib))",
            "memFractionStatic and kvCacheGib both size the KV pool: give one of them",
        ),
    )


class Rdma(Api, frozen=True, kw_only=True):
    """RDMA devices of the pods, from a device plugin."""

    resource: ExtendedResource
    """Extended resource, such as rdma/ib or rdma/hca_shared_devices_a."""
    count: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Number per pod."""

    RULES: ClassVar = (
        Rule(
            "!self.resource.matches('^requests[.]|kubernetes[.]io/')",
            "resource: names of device plugins begin neither with requests. nor with a domain of kubernetes.io",
        ),
    )


class Topology(Api, frozen=True, kw_only=True):
    """Keep prefill and decode near each other."""

    key: LabelKey = "kubernetes.io/hostname"
    """Node label whose value both should share: hostname, rack, NVLink domain."""
    required: bool = False
    """Require it for decode, instead of preferring it."""


class Transfer(Api, frozen=True, kw_only=True):
    """How KV pages move from prefill to decode."""

    expect: Literal["any", "tcp", "rdma", "shm", "cuda_ipc"] = "any"
    """Slowest expected transport; a slower one sets the condition TransportReady to false."""
    digest: Literal["sampled", "full"] = "sampled"
    """Digest that verifies transferred pages: sampled words of each, or every byte."""
    ucx: Annotated[
        dict[
            Annotated[str, msgspec.Meta(pattern=r"^UCX_[A-Z0-9_]+\Z", max_length=64)],
            Annotated[str, printable(max_length=512)],
        ],
        msgspec.Meta(max_length=32),
    ] = {}
    """UCX settings, such as UCX_TLS or UCX_NET_DEVICES."""
    rdma: Rdma | None = None
    """RDMA devices of the pods."""
    topology: Topology | None = None
    """Placement of prefill and decode relative to each other."""

    RULES: ClassVar = (Rule("!has(self.ucx) || self.ucx.all(k, k.startsWith('UCX_'))", "keys of ucx begin with UCX_"),)
