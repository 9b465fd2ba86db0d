"""Kinds of objects that the operator reads or writes, and where the API server has them."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem_operator.api.model_service import GROUP, VERSION
from tandem_operator.builders.worker_group import LEADER_WORKER_SETS
from tandem_operator.planning.observed import Ref


class ServiceKey(NamedTuple):
    """A ModelService by its name: what is queued, locked and looked up."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind in one version."""

    api_version: str
    name: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Of an object, of all of a namespace, or of all there are."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        within = f"/namespaces/{namespace}" if namespace is not None else ""
        return root + within + "".join(f"/{part}" for part in (self.plural, name, subresource) if part)

    def ref(self, name: str) -> Ref:
        return Ref(api_version=self.api_version, kind=self.name, name=name)

    @property
    def group(self) -> str:
        """Empty of the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]


OURS = f"{GROUP}/{VERSION}"

MODEL_SERVICE = Kind(OURS, "ModelService", "modelservices")
WORKER_POOL = Kind(OURS, "WorkerPool", "workerpools")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
HTTP_ROUTE = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
INFERENCE_POOL = Kind("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
LEADER_WORKER_SET = Kind(LEADER_WORKER_SETS, "LeaderWorkerSet", "leaderworkersets")
BUDGETS = tuple(
    Kind(f"policy/{version}", "PodDisruptionBudget", "poddisruptionbudgets") for version in ("v1", "v1beta1")
)

_BY_NAME = {
    (kind.api_version, kind.name): kind
    for kind in (
        MODEL_SERVICE,
        WORKER_POOL,
        DEPLOYMENT,
        POD,
        SERVICE,
        SECRET,
        EVENT,
        LEASE,
        NETWORK_POLICY,
        HTTP_ROUTE,
        INFERENCE_POOL,
        POD_MONITOR,
        LEADER_WORKER_SET,
        *BUDGETS,
    )
}


def kind_of(api_version: str, name: str) -> Kind:
    """The kind of that name. Raises `KeyError` for one that no manifest of ours has."""
    return _BY_NAME[api_version, name]
