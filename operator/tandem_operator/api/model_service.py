"""`ModelService`: one model served under one name, with prefill and decode in separate pods.

    spec     what to serve and how; changes of what the KV or the weights depend on make a new revision
    status   what there is: conditions, the revisions and their shares of the traffic, both roles, last scalings

Life cycle: applied → pools, gateway, Redis and their policies are made → pods become Ready → a canary request goes
through the gateway → `Ready` is true. Deleted → pods drain first.
"""

from typing import Annotated, ClassVar

import msgspec

from tandem_operator.api.autoscaling import Autoscaling, RoleScaling
from tandem_operator.api.conditions import Conditions
from tandem_operator.api.engine import Engine, Transfer
from tandem_operator.api.gateway import Gateway
from tandem_operator.api.images import Images
from tandem_operator.api.markers import Api, Count, ModelName, Quantity, Rule, Seconds
from tandem_operator.api.model_source import ModelSource
from tandem_operator.api.observability import Observability
from tandem_operator.api.pods import PodOverrides, Resources
from tandem_operator.api.redis import Redis
from tandem_operator.api.security import Security

GROUP = "tandem.dev"
VERSION = "v1alpha1"


class Role(Api, frozen=True, kw_only=True):
    """Workers of one role."""

    replicas: Count = 1
    """Workers, where `spec.autoscaling.mode` is none. `external`: where they begin."""
    scaling: RoleScaling = RoleScaling()
    """Bounds of this role for the autoscaler."""
    resources: Resources = Resources()
    """Resources of one worker (of one pod of it, where it spans several). GPUs go into limits."""
    pod: PodOverrides = PodOverrides()
    """What is different about its pods."""
    shared_memory: Quantity = "16Gi"
    """Size limit of /dev/shm. What is used of it counts as the container's memory."""
    engine: Engine = Engine()
    """Engine settings of this role alone; each wins over `spec.engine`. Page size, dtypes and context length may
    not differ between roles and are refused here."""

    RULES: ClassVar = (
        Rule(
            "!has(self.engine) || "
            "!(has(self.engine.pageSize) || has(self.engine.dtype) || has(self.engine.kvCacheDtype)"
            " || has(self.engine.contextLength))",
            "pageSize, dtype, kvCacheDtype and contextLength must be equal for both roles: set them in spec.engine",
        ),
    )


class Rollout(Api, frozen=True, kw_only=True):
    """How a new revision replaces the old one. Workers of one revision are never paired with another's."""

    paused: bool = False
    """Exchange no pod for a newer one, neither between revisions nor within one, of workers, gateways or Redis.
    Scaling goes on."""
    max_surge: Count = 1
    """Workers of each role above the wanted number meanwhile."""
    max_unavailable: Count = 0
    """Workers of each role below the wanted number meanwhile. One of maxSurge and maxUnavailable must be above 0."""
    history: Annotated[int, msgspec.Meta(ge=0, le=20)] = 5
    """Former revisions that are remembered for going back."""
    canary_timeout_seconds: Seconds = 600.0
    """A new revision whose first pair does not answer a canary within this time is stopped and reported."""

    RULES: ClassVar = (
        Rule(
            "!(has(self.maxSurge) && self.maxSurge == 0) || (has(self.maxUnavailable) && self.maxUnavailable > 0)",
            "maxSurge and maxUnavailable are both 0: nothing could ever be replaced; raise one",
        ),
    )


def _gpu_rule(role: str) -> Rule:
    """A role whose device is said to be cuda, by itself or for both, has NVIDIA GPUs."""
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
    """Where the checkpoint comes from. It cannot be exchanged for another kind of source in place."""
    served_model_name: ModelName | None = None
    """Name that clients use; the resource's own without it."""
    aliases: Annotated[
        list[ModelName], msgspec.Meta(max_length=16, extra_json_schema={"x-kubernetes-list-type": "set"})
    ] = []
    """More names for the same model."""
    images: Images = Images()
    """Container images."""
    engine: Engine = Engine()
    """Engine settings of both roles."""
    prefill: Role = Role()
    """Workers that compute prompts."""
    decode: Role = Role()
    """Workers that generate."""
    gateway: Gateway = Gateway()
    """The HTTP front."""
    redis: Redis = Redis()
    """Where gateways and workers find each other."""
    transfer: Transfer = Transfer()
    """How KV pages move from prefill to decode."""
    autoscaling: Autoscaling = Autoscaling()
    """Who decides how many workers there are."""
    rollout: Rollout = Rollout()
    """How a change reaches running workers."""
    drain_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 60
    """What runs on a worker that has to go may take this long to move or to finish. Sets the grace period of pods."""
    security: Security = Security()
    """Network policies, users and keys."""
    observability: Observability = Observability()
    """Logs, traces and monitors."""

    RULES: ClassVar = (
        Rule(
            "(has(self.autoscaling) && has(self.autoscaling.mode) && self.autoscaling.mode != 'none') || "
            "!has(self.decode) || !has(self.decode.replicas) || self.decode.replicas > 0 || "
            "(has(self.prefill) && has(self.prefill.replicas) && self.prefill.replicas == 0)",
            "decode.replicas is 0 while prefill has workers: nobody could answer; set both to 0 to stop serving",
        ),
        _gpu_rule("prefill"),
        _gpu_rule("decode"),
    )


class RoleStatus(Api, frozen=True, kw_only=True):
    """One role as it is."""

    desired: int = 0
    """Workers wanted."""
    ready: int = 0
    """Workers that take requests."""
    pending: int = 0
    """Pods not scheduled yet, or warming up."""


class RevisionStatus(Api, frozen=True, kw_only=True):
    """One revision that has workers."""

    name: str
    """Hash of what KV and weights depend on."""
    share: float = 0.0
    """Part of new requests that it gets, 0 to 1."""
    prefill: RoleStatus = RoleStatus()
    """Its prefill workers."""
    decode: RoleStatus = RoleStatus()
    """Its decode workers."""


class Decision(Api, frozen=True, kw_only=True):
    """One decision of the autoscaler."""

    time: str
    """When, RFC 3339."""
    role: str
    """prefill, decode or both."""
    action: str
    """scale, flip or hold."""
    before: int
    """Workers before."""
    after: int
    """Workers after."""
    reason: str
    """Why, with the figures."""


class ModelServiceStatus(Api, frozen=True, kw_only=True):
    """What there is."""

    observed_generation: int = 0
    """The generation of the spec that this status speaks of."""
    conditions: Conditions = []
    """Ready and what it follows from."""
    ready: str = ""
    """prefill and decode workers of the serving revision that are ready, of those wanted: for `kubectl get`."""
    endpoint: str = ""
    """Where clients inside the cluster reach it."""
    serving: str = ""
    """The revision that gets most new requests; empty while none has a decode worker that is ready."""
    revision: str = ""
    """The revision that the spec wants: it serves, or becomes so."""
    trouble: str = ""
    """What is wrong, in short: for `kubectl get`. Conditions have the whole sentence."""
    revisions: Annotated[list[RevisionStatus], msgspec.Meta(max_length=32)] = []
    """All revisions with workers."""
    history: Annotated[list[str], msgspec.Meta(max_length=32)] = []
    """Former revisions, newest first."""
    decisions: Annotated[list[Decision], msgspec.Meta(max_length=10)] = []
    """The autoscaler's last decisions, newest first."""


class ModelService(Api, frozen=True, kw_only=True):
    """A large language model behind one OpenAI-compatible endpoint, prefill and decode in separate pods."""

    spec: ModelServiceSpec
    """What to serve and how."""
    status: ModelServiceStatus = ModelServiceStatus()
    """What there is, written by the operator."""

    RULES: ClassVar = (
        Rule("self.metadata.name.size() <= 40", "metadata.name: at most 40 characters, for pods' names begin with it"),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name: a DNS label as of Services: a-z, 0-9 and '-', first a letter, last no '-'",
        ),
    )
