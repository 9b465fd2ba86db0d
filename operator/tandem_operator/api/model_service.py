"""`ModelService`: one model served under one name, with prefill and decode in separate pods.

    spec     what to serve and how; changes of what the KV or the weights depend on make a new revision
    status   what there is: conditions, the revisions and their shares of the traffic, both roles, last scalings

Life cycle: applied → pools, gateway, Redis and their policies are made → pods become Ready → a canary request goes
through the gateway → `Ready` is true. Deleted → pods drain first.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.adapters import Adapter, AdapterStatus
from tandem_operator.api.engine import Engine, Transfer
from tandem_operator.api.gateway import Gateway
from tandem_operator.api.pods import PodOverrides, Resources, SecretKey
from tandem_operator.api.slo import Slo, SloStatus
from tandem_operator.api.sources import ModelSource
from tandem_operator.api.types import (
    Api,
    Conditions,
    Count,
    HttpUrl,
    Image,
    Labels,
    ModelName,
    Name,
    Port,
    Quantity,
    Rule,
    Seconds,
    Share,
)


class RoleScaling(Api, frozen=True, kw_only=True):
    """Bounds and target of one role."""

    min_replicas: Count = 1
    """Minimum number of workers; 0 for both roles allows scale to zero."""
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    """Maximum number of workers."""
    target_queue_seconds: Seconds = 1.0
    """Acceptable wait in seconds; requests that wait longer are backlog and require more workers."""
    clear_seconds: Seconds = 30.0
    """Time in which a backlog is to be cleared, in seconds: about the start time of a pod."""
    target_kv_usage: Share = 0.85
    """Share of KV pages in use above which decode gets more workers."""

    RULES: ClassVar = (
        Rule(
            "(has(self.minReplicas) ? self.minReplicas : 1) <= (has(self.maxReplicas) ? self.maxReplicas : 4)",
            "minReplicas must not be above maxReplicas",
        ),
    )


class Autoscaling(Api, frozen=True, kw_only=True):
    """The autoscaler."""

    mode: Literal["none", "internal", "external"] = "none"
    """none: `replicas` as written. internal: by queue depth, both roles together. external: an HPA, KEDA or
    `kubectl scale` owns the pools."""
    gpu_budget: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """Maximum number of GPUs of both roles together."""
    flip_roles: bool = True
    """Change the role of a running worker before adding or removing pods."""
    period_seconds: Seconds = 5.0
    """Seconds between two decisions."""
    scale_up_window_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0
    """Seconds for which more workers must be required before workers are added."""
    scale_down_window_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 300.0
    """Seconds for which fewer workers must suffice before workers are removed."""
    tolerance: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.1
    """Relative distance from the target within which nothing changes."""
    max_step_up: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    """Maximum number of workers that one decision adds to a role."""
    max_step_down: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    """Maximum number of workers that one decision removes from a role."""
    idle_seconds_to_zero: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 0.0
    """Idle seconds after which both roles scale to 0; 0: never. The first request then waits in the gateway."""
    cooldown_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 30.0
    """Minimum seconds between opposite changes of a role."""


class Images(Api, frozen=True, kw_only=True):
    """Container images; by default those of the operator's version."""

    engine: Image | None = None
    """Image of the workers of both roles. Empty: the operator's image for CPUs or for GPUs, by the role's
    `engine.device`."""
    services: Image | None = None
    """Image of the gateway."""
    redis: Image | None = None
    """Image of a managed Redis."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When images are pulled; empty: the cluster's default."""
    pull_secrets: Annotated[list[Name], msgspec.Meta(max_length=8)] = []
    """Secrets for pulling images."""


class Observability(Api, frozen=True, kw_only=True):
    """Logs, traces and monitors."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines."""
    otlp_traces_endpoint: HttpUrl | None = None
    """OpenTelemetry collector for traces, over HTTP; default: no traces."""
    trace_sample_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Share of requests that are traced, where the client has not decided; default: all."""
    service_monitor: bool = False
    """Create PodMonitors of gateways and workers; requires the Prometheus operator."""
    metrics_namespaces: Labels = {}
    """Labels of namespaces, such as that of Prometheus, whose pods the network policies allow to read metrics. Empty:
    none."""


class ManagedRedis(Api, frozen=True, kw_only=True):
    """One pod with a generated password, without a disk: workers republish its contents after a loss."""

    resources: Resources = Resources(requests={"cpu": "250m", "memory": "512Mi"}, limits={"memory": "1Gi"})
    """Its resources. The index of a million cached blocks takes about 100 MiB."""
    pod: PodOverrides = PodOverrides()
    """Changes to its pod."""


_REDIS_USER = r"([-._a-zA-Z0-9]+@)?"
_PORT = "(:(6553[0-5]|655[0-2][0-9]|65[0-4][0-9][0-9]|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}))?"
_REDIS_HOST = rf"([-._a-zA-Z0-9]+|\[[0-9a-fA-F:.]+\]){_PORT}"
_REDIS_URL = (
    rf"^(rediss?://{_REDIS_USER}{_REDIS_HOST}(/[0-9]+)?"
    rf"|rediss?\+cluster://{_REDIS_USER}{_REDIS_HOST}(,{_REDIS_HOST})*(/0?)?"
    rf"|rediss?\+sentinel://{_REDIS_USER}{_REDIS_HOST}(,{_REDIS_HOST})*/[-._a-zA-Z0-9]+(/[0-9]+)?)$"
)


class ExternalRedis(Api, frozen=True, kw_only=True):
    """An existing Redis (7 or later) or Valkey; several services may share it."""

    url: Annotated[str, msgspec.Meta(pattern=_REDIS_URL, max_length=512)]
    """redis://, redis+cluster:// for nodes of a cluster, redis+sentinel:// for Sentinels and the name of a service; the
    same with rediss for TLS. The ACL user stands before an @. No password."""
    password: SecretKey | None = None
    """Its password."""
    sentinel_user: Annotated[str, msgspec.Meta(pattern=r"^[-._a-zA-Z0-9]+$", max_length=128)] | None = None
    """ACL user of the Sentinels; default: their default user."""
    sentinel_password: SecretKey | None = None
    """Password of the Sentinels; default: none."""
    ca_secret: SecretKey | None = None
    """Certificate authority of an address with rediss, PEM; default: those of the image."""

    RULES: ClassVar = (
        Rule("!has(self.caSecret) || self.url.startsWith('rediss')", "caSecret is for TLS: a url with rediss"),
        Rule(
            "!has(self.sentinelPassword) || self.url.matches('^rediss?[+]sentinel://')",
            "sentinelPassword is for Sentinels: a url with +sentinel://",
        ),
        Rule("!has(self.sentinelUser) || has(self.sentinelPassword)", "sentinelUser needs sentinelPassword"),
    )


class Redis(Api, frozen=True, kw_only=True):
    """Managed, or external."""

    managed: ManagedRedis | None = None
    """A Redis only for this service; the default."""
    external: ExternalRedis | None = None
    """An existing Redis."""

    RULES: ClassVar = (Rule("!(has(self.managed) && has(self.external))", "give managed or external, not both"),)


class Cell(Api, frozen=True, kw_only=True):
    """Another ModelService of the namespace that serves the same model, with workers and a Redis of its own."""

    service: Name
    """Its name. Its own `cells` has to list this service."""
    redis: ExternalRedis | None = None
    """Its Redis where that is external; default: the managed Redis of that service."""


class EgressRule(Api, frozen=True, kw_only=True):
    """A destination outside of the service that its pods may reach."""

    cidr: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=49)] | None = None
    """Addresses, such as 10.0.0.0/8; default: all."""
    ports: Annotated[list[Port], msgspec.Meta(max_length=16)] = []
    """TCP ports; empty: all ports of all protocols."""


class Security(Api, frozen=True, kw_only=True):
    """Network policies, users and keys."""

    network_policies: bool = True
    """Deny all connections that the components do not need: clients reach only the gateway."""
    egress: Annotated[list[EgressRule], msgspec.Meta(max_length=16)] = []
    """Additional destinations that the network policies allow for workers, gateways and routers. Always allowed are
    each other, DNS and, if the spec names them, an external Redis, the collector of traces and the Hugging Face hub
    (port 443)."""
    client_namespaces: Labels = {}
    """Labels of namespaces whose pods may reach the gateway; empty: all may."""
    run_as_user: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 10001
    """User and group of all containers; never root."""
    curve_secret: Name | None = None
    """Secret with the key file of the sockets between the components (key `keys.json`); default: one is created. It
    cannot change: other keys require another resource."""

    RULES: ClassVar = (
        Rule(
            "has(self.curveSecret) == has(oldSelf.curveSecret) && "
            "(!has(self.curveSecret) || self.curveSecret == oldSelf.curveSecret)",
            "curveSecret cannot change: pods with other keys do not talk to those that run; make another resource",
        ),
    )


GROUP = "tandem.dev"
VERSION = "v1beta1"
"""Of the API: what is stored, and what the operator, the plugin and the charts use."""

FORMER_VERSIONS = ("v1alpha1",)
"""Served too, with the same schema: objects are converted by their apiVersion alone."""


class Role(Api, frozen=True, kw_only=True):
    """Workers of one role."""

    replicas: Count = 1
    """Number of workers if `spec.autoscaling.mode` is none; with `external` the initial number."""
    scaling: RoleScaling = RoleScaling()
    """Bounds of this role for the autoscaler."""
    resources: Resources = Resources()
    """Resources of one worker (of one pod of it, where it spans several). GPUs go into limits."""
    pod: PodOverrides = PodOverrides()
    """Changes to its pods."""
    shared_memory: Quantity = "16Gi"
    """Size limit of /dev/shm. Its use counts as memory of the container."""
    engine: Engine = Engine()
    """Engine settings of this role; each overrides `spec.engine`. Page size, dtypes, context length,
    quantization and implementation must not differ between roles and are rejected here."""

    RULES: ClassVar = (
        Rule(
            "!has(self.engine) || "
            "!(has(self.engine.pageSize) || has(self.engine.dtype) || has(self.engine.kvCacheDtype)"
            " || has(self.engine.contextLength) || has(self.engine.quantization) || has(self.engine.modelImpl))",
            "pageSize, dtype, kvCacheDtype, contextLength, quantization and modelImpl must be equal for both roles: "
            "set them in spec.engine",
        ),
    )


class GatewayRef(Api, frozen=True, kw_only=True):
    """A ModelGateway of the same namespace."""

    name: Name
    """Its name."""


class Rollout(Api, frozen=True, kw_only=True):
    """How a new revision replaces the old one. Workers of one revision are never paired with another's."""

    paused: bool = False
    """Do not replace pods of workers, gateways or Redis, between revisions or within one. Scaling continues."""
    max_surge: Count = 1
    """Maximum number of additional workers of each role during a rollout."""
    max_unavailable: Count = 0
    """Maximum number of missing workers of each role during a rollout. One of maxSurge and maxUnavailable must be
    above 0."""
    history: Annotated[int, msgspec.Meta(ge=0, le=20)] = 5
    """Number of former revisions kept for a rollback."""
    canary_timeout_seconds: Seconds = 600.0
    """Seconds in which the first pair of a new revision must pass a canary; otherwise it is stopped and reported."""

    RULES: ClassVar = (
        Rule(
            "!(has(self.maxSurge) && self.maxSurge == 0) || (has(self.maxUnavailable) && self.maxUnavailable > 0)",
            "maxSurge and maxUnavailable are both 0: nothing could ever be replaced; raise one",
        ),
    )


def _gpu_rule(role: str) -> Rule:
    """A role whose device is cuda, by its own field or that of both, has NVIDIA GPUs."""
    own = f"(has(self.{role}) && has(self.{role}.engine) && has(self.{role}.engine.device))"
    common = "(has(self.engine) && has(self.engine.device) && self.engine.device == 'cuda')"
    limits = f"has(self.{role}) && has(self.{role}.resources) && has(self.{role}.resources.limits)"
    return Rule(
        f"!({own} ? self.{role}.engine.device == 'cuda' : {common}) || "
        f"({limits} && self.{role}.resources.limits.exists(k, k.startsWith('nvidia.com/')))",
        f'device cuda needs GPUs: add nvidia.com/gpu: "1" to spec.{role}.resources.limits, or take device out',
    )


class ModelServiceSpec(Api, frozen=True, kw_only=True):
    """What to serve and how."""

    model: ModelSource
    """Source of the checkpoint. The kind of source cannot change."""
    served_model_name: ModelName | None = None
    """Name that clients use; default: the name of the resource."""
    aliases: Annotated[
        list[ModelName], msgspec.Meta(max_length=16, extra_json_schema={"x-kubernetes-list-type": "set"})
    ] = []
    """More names for the same model."""
    adapters: Annotated[
        list[Adapter],
        msgspec.Meta(
            max_length=64,
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    """LoRA adapters of the model, for workers on CPUs. A change replaces no pods unless it changes which volumes the
    workers have. ModelAdapters add further ones."""
    adapter_claims: Annotated[
        list[Name], msgspec.Meta(max_length=16, extra_json_schema={"x-kubernetes-list-type": "set"})
    ] = []
    """PersistentVolumeClaims with adapters that all workers mount read-only, whether an adapter is on them or not:
    adapters on them come and go without new pods. Required for ModelAdapters."""
    images: Images = Images()
    """Container images."""
    kernel_cache_claim: Name | None = None
    """PersistentVolumeClaim in which workers on GPUs keep compiled kernels, so that new pods do not compile them.
    Access mode ReadWriteMany for workers on several nodes. Kernels are code: nothing else should write to it. Default:
    each pod compiles its own."""
    engine: Engine = Engine()
    """Engine settings of both roles."""
    prefill: Role = Role()
    """Workers that compute prompts."""
    decode: Role = Role()
    """Workers that generate."""
    gateway: Gateway = Gateway()
    """The gateway, which serves the HTTP API. With `gatewayRef` only what depends on the model."""
    gateway_ref: GatewayRef | None = None
    """A ModelGateway of the same namespace that serves this service too. No gateway is then created for it alone."""
    redis: Redis = Redis()
    """Redis for the registry and the prefix index."""
    cells: Annotated[
        list[Cell],
        msgspec.Meta(
            max_length=16,
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["service"]},
        ),
    ] = []
    """Other cells: ModelServices whose workers take requests that this one cannot serve, because its workers are full
    or gone or its Redis is away. All have the same `servedModelName` and `security.curveSecret`. Default: none."""
    transfer: Transfer = Transfer()
    """Transfer of KV pages from prefill to decode."""
    autoscaling: Autoscaling = Autoscaling()
    """Control of the number of workers."""
    slo: Slo | None = None
    """Latency objectives; default: none."""
    rollout: Rollout = Rollout()
    """Replacement of workers when the spec changes."""
    drain_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 60
    """Seconds for requests of a draining worker to migrate or finish. Sets the grace period of pods."""
    security: Security = Security()
    """Network policies, users and keys."""
    observability: Observability = Observability()
    """Logs, traces and monitors."""

    RULES: ClassVar = (
        Rule(
            "(has(self.autoscaling) && has(self.autoscaling.mode) && self.autoscaling.mode != 'none') || "
            "!has(self.decode) || !has(self.decode.replicas) || self.decode.replicas > 0 || "
            "(has(self.prefill) && has(self.prefill.replicas) && self.prefill.replicas == 0)",
            "decode.replicas is 0 while prefill has workers: no worker could decode; set both to 0 to stop serving",
        ),
        _gpu_rule("prefill"),
        _gpu_rule("decode"),
        Rule(
            "!has(self.adapters) || !has(self.aliases) || !self.adapters.exists(a, a.name in self.aliases)",
            "adapters: a name is one of aliases; give the adapter another name",
        ),
        Rule(
            "!has(self.adapters) || !has(self.servedModelName) || "
            "!self.adapters.exists(a, a.name == self.servedModelName)",
            "adapters: a name is servedModelName; give the adapter another name",
        ),
    )


class RoleStatus(Api, frozen=True, kw_only=True):
    """Observed state of one role."""

    desired: int = 0
    """Desired number of workers."""
    ready: int = 0
    """Workers that serve requests."""
    pending: int = 0
    """Pods not scheduled yet, or warming up."""


class RevisionStatus(Api, frozen=True, kw_only=True):
    """One revision that has workers."""

    name: str
    """Hash of the fields on which KV and weights depend."""
    share: float = 0.0
    """Share of new requests that it gets, 0 to 1."""
    prefill: RoleStatus = RoleStatus()
    """Its prefill workers."""
    decode: RoleStatus = RoleStatus()
    """Its decode workers."""


class Decision(Api, frozen=True, kw_only=True):
    """One decision of the autoscaler."""

    time: str
    """Time of the decision, RFC 3339."""
    role: str
    """prefill, decode or both."""
    action: str
    """scale, flip, hold, or restore: replicas that someone else had changed."""
    before: int
    """Workers before."""
    after: int
    """Workers after."""
    reason: str
    """Reason, with the metrics."""


class ModelServiceStatus(Api, frozen=True, kw_only=True):
    """Observed state."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Conditions = []
    """Ready, and the conditions on which it depends."""
    ready: str = ""
    """Ready and desired prefill and decode workers of the serving revision: for `kubectl get`."""
    endpoint: str = ""
    """Address for clients inside the cluster."""
    serving: str = ""
    """Revision that gets most new requests; empty while none has a ready decode worker."""
    revision: str = ""
    """Revision of the current spec."""
    error: str = ""
    """Short error: for `kubectl get`. Conditions have the details."""
    revisions: Annotated[list[RevisionStatus], msgspec.Meta(max_length=32)] = []
    """All revisions with workers."""
    history: Annotated[list[str], msgspec.Meta(max_length=32)] = []
    """Former revisions, newest first."""
    decisions: Annotated[list[Decision], msgspec.Meta(max_length=10)] = []
    """The autoscaler's last decisions, newest first."""
    slo: SloStatus | None = None
    """How well the objectives are met; absent without `spec.slo`, and before there were requests."""
    adapters: Annotated[list[AdapterStatus], msgspec.Meta(max_length=256)] = []
    """Adapters of the spec and of ModelAdapters, and removed ones until they are unloaded."""


NAME_RULES = (
    Rule("self.metadata.name.size() <= 40", "metadata.name: at most 40 characters, for pods' names begin with it"),
    Rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name: a DNS label as of Services: a-z, 0-9 and '-', first a letter, last no '-'",
    ),
)
"""Of resources whose pods' and Services' names begin with theirs."""


class ModelService(Api, frozen=True, kw_only=True):
    """A large language model behind one OpenAI-compatible endpoint, prefill and decode in separate pods."""

    spec: ModelServiceSpec
    """What to serve and how."""
    status: ModelServiceStatus = ModelServiceStatus()
    """Observed state, written by the operator."""

    RULES: ClassVar = NAME_RULES
