"""Builds the planner's input from the known objects of a service and from the results of polling its pods. Pure.

Only objects whose controller is the service itself count. An object that merely has the same labels or the same name
belongs to another owner: it is not counted, changed or deleted.

`Observations` has the results of polling: canaries, links, decisions of the autoscaler. The pod poller updates them
every few seconds; reconciles only read them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tandem_operator.api.model_service import Decision, ModelServiceStatus
from tandem_operator.api.types import ROLES, RoleName
from tandem_operator.builders.arguments import CHECK
from tandem_operator.builders.naming import REVISION_LABEL, ROLE_LABEL, selector_of
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import FOLLOWER
from tandem_operator.controller.store import (
    DEPLOYMENT,
    LEADER_WORKER_SET,
    MODEL_ADAPTER,
    POD,
    WORKER_POOL,
    Seen,
    ServiceKey,
    ask_of,
)
from tandem_operator.planning.adapters import AdapterAsk, Reading
from tandem_operator.planning.deletion import gateway_selector
from tandem_operator.planning.observed import Canary, DeploymentSeen, Observed, Ref
from tandem_operator.planning.plan import wanted_workers
from tandem_operator.planning.pod_failure import pod_failure
from tandem_operator.planning.slo import SloSeen
from tandem_operator.planning.status import GATEWAY_CANARY
from tandem_operator.telemetry.pods import COMPONENT_LABEL, PodSeen
from tandem_operator.telemetry.samples import LoadReading
from tandem_operator.telemetry.worker_control import ModelAt

_ENDED = ("Succeeded", "Failed")
MAX_FAILURE_TEXT = 500


@dataclass(frozen=True, slots=True)
class Parts:
    """Objects of one service, those apart that it owns."""

    owned: dict[Ref, Seen]
    pods: tuple[Seen, ...]
    """With the service's label; ended ones left out. Their owners are ReplicaSets."""
    model_adapters: tuple[Seen, ...] = ()
    """Those that name the service; ones being deleted left out. People own them."""

    @staticmethod
    def of(uid: str, seen: Iterable[Seen]) -> "Parts":
        """`uid`: of the service."""
        everything = list(seen)
        owned = {one.ref: one for one in everything if one.owner == uid}
        pods = tuple(one for one in everything if one.ref.kind == POD.name and not _ended(one))
        return Parts(owned=owned, pods=pods, model_adapters=model_adapters_of(everything))

    def removable(self) -> frozenset[Ref]:
        """Objects that a plan may delete: not pools, which stay with the service, and not objects being deleted."""
        return frozenset(
            ref for ref, one in self.owned.items() if not one.deleting and ref.kind not in (WORKER_POOL.name, POD.name)
        )

    def pools(self) -> dict[RoleName, int]:
        """`spec.replicas` of the WorkerPools."""
        counts: dict[RoleName, int] = {}
        for one in self.owned.values():
            if one.ref.kind == WORKER_POOL.name and not one.deleting:
                spec = one.body["spec"]
                counts[spec["role"]] = spec.get("replicas", 1)
        return counts

    def deployments(self, failing: Mapping[str, str] = MappingProxyType({})) -> tuple[DeploymentSeen, ...]:
        """Deployments and groups of the service that are not being deleted. `failing`: as `Observations.failing`."""
        mine = [one for one in self.owned.values() if not one.deleting]
        plain = [
            _deployment(one, self.pods_with(one.body["spec"]["selector"]["matchLabels"]), failing)
            for one in mine
            if one.ref.kind == DEPLOYMENT.name
        ]
        return (*plain, *(self._group(one, failing) for one in mine if one.ref.kind == LEADER_WORKER_SET.name))

    def _group(self, seen: Seen, failing: Mapping[str, str]) -> DeploymentSeen:
        """Leaders are the workers; a follower that does not start is an error too."""
        labels = selector_of(seen.body["metadata"].get("labels", {}))
        found = _deployment(seen, self.pods_with(labels), failing)
        followers = [pod for pod in self.pods_with({**labels, COMPONENT_LABEL: FOLLOWER}) if not pod.deleting]
        failure = found.failure or _failure({}, followers, failing)
        return replace(found, paused=_partition(seen) > 0, failure=failure)

    def adapter_requests(self) -> tuple[AdapterAsk, ...]:
        """ModelAdapters, in the form for planning."""
        return tuple(map(ask_of, self.model_adapters))

    def ready_workers(self) -> dict[str, RoleName]:
        """Roles of ready workers by pod."""
        seen = self.pods_seen()
        return {pod.name: pod.worker_role for pod in seen if pod.worker_role and pod.ready and not pod.terminating}

    def pods_seen(self) -> tuple[PodSeen, ...]:
        """Workers and gateways, in the form for polling."""
        return tuple(pod for one in self.pods if (pod := PodSeen.of(one.body)) is not None)

    def pods_with(self, labels: Mapping[str, str]) -> list[Seen]:
        """Pods with these labels, also terminating ones."""
        return [pod for pod in self.pods if labels.items() <= pod.body["metadata"].get("labels", {}).items()]

    def ready_pods(self, labels: Mapping[str, str]) -> list[Seen]:
        """Pods with these labels that accept requests."""
        return [pod for pod in self.pods_with(labels) if _ready(pod) and not pod.deleting]


def model_adapters_of(seen: Iterable[Seen]) -> tuple[Seen, ...]:
    """ModelAdapters among objects of one service."""
    return tuple(one for one in seen if one.ref.kind == MODEL_ADAPTER.name and not one.deleting)


def _deployment(seen: Seen, pods: list[Seen], failing: Mapping[str, str]) -> DeploymentSeen:
    body = seen.body
    labels = body["metadata"].get("labels", {})
    role = next((role for role in ROLES if role == labels.get(ROLE_LABEL)), None)
    living = [pod for pod in pods if not pod.deleting]
    return DeploymentSeen(
        name=seen.ref.name,
        api_version=seen.ref.api_version,
        kind=seen.ref.kind,
        replicas=body["spec"].get("replicas", 1),
        # From the pods themselves: the Deployment's own status lags.
        ready=sum(_ready(pod) for pod in living),
        pods=len(living),
        role=role,
        revision=labels.get(REVISION_LABEL),
        created=body["metadata"].get("creationTimestamp", ""),
        exchanging=_exchanging(body),
        paused=body["spec"].get("paused", False),
        accepted=_accepted(body, living),
        failure=_failure(body, living, failing),
    )


def _exchanging(body: dict[str, Any]) -> bool:
    """A Deployment or a LeaderWorkerSet with pods of an older template, or too few of the newest."""
    status = body.get("status", {})
    updated = status.get("updatedReplicas", 0)
    return bool(updated < body["spec"].get("replicas", 1) or status.get("replicas", 0) > updated)


def _accepted(body: dict[str, Any], pods: list[Seen]) -> tuple[str, ...]:
    """Words that the check of the newest template has accepted in one of `pods`."""
    spec = body["spec"]
    template = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("leaderTemplate", {})
    check = _check(template.get("spec", {}))
    if not check or not any(_check(pod.body["spec"]) == check and _checked(pod) for pod in pods):
        return ()
    return tuple(check["args"])


def _check(spec: dict[str, Any]) -> dict[str, Any]:
    """What the init container of a pod checks, and where; empty without one."""
    found = (one for one in spec.get("initContainers", ()) if one["name"] == CHECK)
    return {key: one.get(key) for one in found for key in ("image", "command", "args")}


def _checked(pod: Seen) -> bool:
    """Whether that container has ended well. A pod is ready only after its init containers."""
    ended = (one for one in pod.body["status"].get("initContainerStatuses", ()) if one["name"] == CHECK)
    return _ready(pod) or any(one.get("state", {}).get("terminated", {}).get("exitCode") == 0 for one in ended)


def _partition(group: Seen) -> int:
    """Number of groups that keep their template."""
    strategy = group.body["spec"].get("rolloutStrategy", {})
    return int(strategy.get("rollingUpdateConfiguration", {}).get("partition", 0))


def _ready(pod: Seen) -> bool:
    conditions = pod.body["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _ended(pod: Seen) -> bool:
    return pod.ref.kind == POD.name and pod.body["status"].get("phase") in _ENDED


def _failure(deployment: dict[str, Any], pods: list[Seen], failing: Mapping[str, str]) -> str:
    """The first failure of a pod, or else the reason why the Deployment cannot create pods."""
    for pod in sorted(pods, key=lambda one: one.ref.name):
        for text in pod_failure(pod.body["status"]):
            return text[:MAX_FAILURE_TEXT]
        if pod.ref.name in failing and not _ready(pod):
            return f"no canary passes through {pod.ref.name}: {failing[pod.ref.name]}"[:MAX_FAILURE_TEXT]
    for one in deployment.get("status", {}).get("conditions", ()):
        if one["type"] == "ReplicaFailure" and one["status"] == "True":
            return str(one.get("message", one.get("reason", "")))[:MAX_FAILURE_TEXT]
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Results of the last poll of one service."""

    canaries: Mapping[str, Canary] = field(default_factory=dict)
    """Results of canaries by revision, as `Observed.canaries`."""
    via: str = ""
    """ModelGateway through which they were sent; empty: the service's own gateways."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Pods through which canaries fail, although their revision has passed: name → reason."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links slower than expected, as `Observed.links`."""
    releases: Mapping[str, int] = field(default_factory=dict)
    """Of pods that report metrics, as `Observed.releases`."""
    decisions: tuple[Decision, ...] | None = None
    """Decisions of the autoscaler, newest first; None: none since this operator leads, those in the status stay."""
    holding: str = ""
    """Why the autoscaler changes nothing; empty if it may."""
    slo: SloSeen | None = None
    """How well latency objectives are met, as `Observed.slo`."""
    adapters: Reading = field(default_factory=Reading)
    """What the gateways have."""
    pods: LoadReading | None = field(default=None, compare=False)
    """The last metrics of pods. They change each time and do not cause a reconcile."""

    def canaries_through(self, gateway: str) -> Mapping[str, Canary]:
        """`canaries`; that of the gateways only if these are the ones that the service has now. `gateway`: as `via`."""
        if self.via == gateway:
            return self.canaries
        return {name: canary for name, canary in self.canaries.items() if name != GATEWAY_CANARY}


class ObservationStore:
    """The latest observations of each service."""

    def __init__(self) -> None:
        self._of: dict[ServiceKey, Observations] = {}

    def of(self, key: ServiceKey) -> Observations | None:
        """None if the service was not polled yet."""
        return self._of.get(key)

    def put(self, key: ServiceKey, observations: Observations) -> bool:
        """Whether the observations have changed."""
        before = self._of.get(key)
        self._of[key] = observations
        return before != observations

    def forget(self, key: ServiceKey) -> None:
        self._of.pop(key, None)

    def clear(self) -> None:
        self._of.clear()


def canaries_by_readiness(
    service: str, parts: Parts, roles: Iterable[RoleName] = ROLES, *, shared: Iterable[PodSeen] = ()
) -> dict[str, Canary]:
    """A revision has passed when it has a ready pod of each of `roles`: with canaries switched off
    (`--canary off`), and where there are no pairs to test, because there is no separate prefill role.

    `shared`: gateways of the ModelGateway to which the service refers.
    """
    ready: dict[str, set[RoleName]] = {}
    for one in parts.deployments():
        if one.revision is not None and one.role is not None and one.ready:
            ready.setdefault(one.revision, set()).add(one.role)
    passed = {revision: Canary(passed=True) for revision, found in ready.items() if found.issuperset(roles)}
    if passed and (parts.ready_pods(gateway_selector(service)) or any(pod.usable for pod in shared)):
        passed[GATEWAY_CANARY] = Canary(passed=True)
    return passed


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A service, its objects, and its pods, with the gateways of its ModelGateway."""

    service: Seen
    wanted: Served
    status: ModelServiceStatus
    parts: Parts
    pods: tuple[PodSeen, ...]
    now: str
    """RFC 3339."""
    gateway: Served | None = None
    """The ModelGateway to which it refers; None: its gateways are its own."""
    model: ModelAt | None = None
    """Its model at the gateways of that one."""

    @property
    def adapter_requests(self) -> tuple[AdapterAsk, ...]:
        """ModelAdapters that name the service."""
        return self.parts.adapter_requests()

    @property
    def rolling_out(self) -> bool:
        """Whether there are workers of another revision."""
        return any(one.replicas or one.pods for one in self.parts.deployments() if one.role and self._old(one.revision))

    @property
    def has_pairs(self) -> bool:
        """Whether there is a separate prefill role: otherwise no canary can pass from one worker to another."""
        return wanted_workers(self.wanted, Observed(now=self.now, pools=self.parts.pools()))["prefill"] > 0

    def _old(self, revision: str | None) -> bool:
        return revision != self.status.revision
