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
    """Engine settings of this role; each overrides `spec.engine`. Page size, dtypes and context length must not
    differ between roles and are rejected here."""

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
    """Source of the checkpoint. The kind of source cannot change."""
    served_model_name: ModelName | None = None
    """Name that clients use; default: the name of the resource."""
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
    """The gateway, which serves the HTTP API."""
    redis: Redis = Redis()
    """Redis for the registry and the prefix index."""
    transfer: Transfer = Transfer()
    """Transfer of KV pages from prefill to decode."""
    autoscaling: Autoscaling = Autoscaling()
    """Control of the number of workers."""
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
    """scale, flip or hold."""
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
    trouble: str = ""
    """Short error: for `kubectl get`. Conditions have the details."""
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
    """Observed state, written by the operator."""

    RULES: ClassVar = (
        Rule("self.metadata.name.size() <= 40", "metadata.name: at most 40 characters, for pods' names begin with it"),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name: a DNS label as of Services: a-z, 0-9 and '-', first a letter, last no '-'",
        ),
    )
