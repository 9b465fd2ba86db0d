"""The observed state of the cluster, from which a plan is made. `controller` reads it; the planner only uses it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem_operator.api.model_service import Decision
from tandem_operator.api.sources import ClaimSource
from tandem_operator.api.types import RoleName
from tandem_operator.planning.adapters import AdapterAsk, Reading, Workers
from tandem_operator.planning.slo import SloSeen


@dataclass(frozen=True, kw_only=True, slots=True)
class Ref:
    """An object of the service's namespace."""

    api_version: str
    kind: str
    name: str

    @staticmethod
    def of(body: Mapping[str, Any]) -> "Ref":
        """Of a manifest, or of an object as the API server has it."""
        return Ref(api_version=body["apiVersion"], kind=body["kind"], name=body["metadata"]["name"])


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentSeen:
    """A Deployment of ours, or a LeaderWorkerSet, whose leaders count as its pods."""

    name: str
    api_version: str = "apps/v1"
    kind: str = "Deployment"
    replicas: int
    """From its spec."""
    ready: int = 0
    pods: int = 0
    """Those that are there, terminating ones left out."""
    role: RoleName | None = None
    """Of workers."""
    revision: str | None = None
    created: str = ""
    """RFC 3339, so that names sort by age."""
    exchanging: bool = False
    """Its pods are being exchanged for those of its newest template."""
    paused: bool = False
    """Its pods are not replaced, whatever its template is."""
    accepted: tuple[str, ...] = ()
    """Arguments of its newest template that were checked in a pod of it; empty before that, and where none are."""
    failure: str = ""
    """Why pods do not come up, in the words of the scheduler or the kubelet."""

    @property
    def ref(self) -> Ref:
        return Ref(api_version=self.api_version, kind=self.kind, name=self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """What became of the last canary request through a revision's pair, or through the gateway."""

    passed: bool
    message: str = ""
    unserved: bool = False
    """The gateway has several models, and not this one yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySeen:
    """The ModelGateway that a service refers to."""

    endpoint: str = ""
    deployment: DeploymentSeen | None = None
    """Of its gateways."""
    replicas: int = 1
    """Gateways that it is to have."""
    reason: str = ""
    """Why it does not serve the service as its spec has it; empty where it does."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSeen:
    """The ModelCache that a service names."""

    name: str
    exists: bool = False
    claim: ClaimSource | None = None
    """Directory of the commit to serve; None before there is one."""
    mounted: ClaimSource | None = None
    """Directory of the commit that the service's workers have; None before there are some."""
    commit: str = ""
    reason: str = ""
    """Why there is none, or that another one is on its way."""
    message: str = ""

    @property
    def served(self) -> ClaimSource | None:
        """That of the ModelCache. Without one, workers keep what they have, and are scaled."""
        return self.claim or self.mounted


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """All that a plan depends on, in addition to the spec."""

    now: str
    """RFC 3339."""
    pools: Mapping[RoleName, int] = field(default_factory=dict)
    """`spec.replicas` of the WorkerPools that exist."""
    deployments: tuple[DeploymentSeen, ...] = ()
    secrets: frozenset[str] = frozenset()
    """Names of the Secrets that exist, of those the service refers to."""
    owned: frozenset[Ref] = frozenset()
    """Objects that carry the service's owner reference and that a plan may take away."""
    foreign: frozenset[Ref] = frozenset()
    """Objects with a name that a plan needs, and with another owner."""
    canaries: Mapping[str, Canary] = field(default_factory=dict)
    """Of each revision with a pair that answered or failed; under "" that through the gateway."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links that are slower than expected: pair → transport that carries it."""
    releases: Mapping[str, int] = field(default_factory=dict)
    """Of workers and gateways that report metrics, by pod (`base.release`)."""
    decisions: tuple[Decision, ...] | None = None
    """The autoscaler's last ones, newest first; None: as the status has them."""
    holding: str = ""
    """Why the autoscaler holds; empty while it does not."""
    slo: SloSeen | None = None
    """How well latency objectives are met; None of a service without, and before metrics were read."""
    gateway: GatewaySeen | None = None
    """Of a service with `gatewayRef`; None where there is no ModelGateway of that name."""
    cache: CacheSeen | None = None
    """Of a service with `cacheRef`."""
    adapter_requests: tuple[AdapterAsk, ...] = ()
    """ModelAdapters that name the service."""
    adapters: Reading = field(default_factory=Reading)
    """What its gateways have."""
    ready_workers: Workers = field(default_factory=dict)
    """Roles by pod."""

    def workers(self) -> list[DeploymentSeen]:
        """Those of workers, oldest first."""
        workers = [one for one in self.deployments if one.role is not None]
        return sorted(workers, key=lambda one: (one.created, one.name))

    def deployment(self, name: str) -> DeploymentSeen | None:
        """The one of that name."""
        return next((one for one in self.deployments if one.name == name), None)
