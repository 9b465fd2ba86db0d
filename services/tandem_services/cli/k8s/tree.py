"""A ModelService with all that belongs to it, as one value: what `status` shows, and its JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem_services.cli.k8s.cluster import Object
from tandem_services.cli.k8s.pods import GATEWAY, WORKER, Pod, Said

ROLES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionSeen:
    """One condition."""

    type: str
    status: str
    reason: str
    message: str
    stale: bool
    """It speaks of a spec that has been changed since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSeen:
    """A pod, and what it says."""

    pod: Pod
    said: Said | None
    """None: it was not asked."""
    followers: tuple["PodSeen", ...] = ()
    """The other pods of a worker that has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RevisionSeen:
    """The workers of one role of one revision."""

    name: str
    share: float
    """Of new requests, 0 to 1."""
    pods: tuple[PodSeen, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSeen:
    """One role."""

    role: str
    wanted: int
    ready: int
    """As the pool has it; by its pods where there is no pool yet."""
    revisions: tuple[RevisionSeen, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTree:
    """One ModelService."""

    name: str
    namespace: str
    endpoint: str
    revision: str
    observed: bool
    """The operator has seen the spec as it is."""
    conditions: tuple[ConditionSeen, ...]
    roles: tuple[RoleSeen, ...]
    others: tuple[PodSeen, ...]
    """Gateways, a managed Redis, and followers whose leader is not there."""


def service_tree(
    service: Object, pools: Sequence[Object], pods: Sequence[Object], figures: Mapping[str, Said]
) -> ServiceTree:
    """`pools` and `pods`: at least those of the service; `figures`: by pod name."""
    metadata, status = service["metadata"], service.get("status", {})
    name, generation = metadata["name"], metadata.get("generation", 0)
    own = sorted((Pod.of(pod) for pod in pods), key=lambda pod: pod.name)
    seen = _grouped([PodSeen(pod=pod, said=figures.get(pod.name)) for pod in own if pod.service == name])
    wanted = {pool["spec"]["role"]: pool for pool in pools if pool["spec"].get("serviceName") == name}
    return ServiceTree(
        name=name,
        namespace=metadata["namespace"],
        endpoint=status.get("endpoint", ""),
        revision=status.get("revision", ""),
        observed=status.get("observedGeneration") == generation,
        conditions=tuple(_condition(one, generation) for one in status.get("conditions", ())),
        roles=tuple(_role(role, service, wanted.get(role), seen) for role in ROLES),
        others=tuple(one for one in seen if one.pod.component != WORKER),
    )


def _grouped(seen: Sequence[PodSeen]) -> list[PodSeen]:
    """Followers below their leaders."""
    leaders = {one.pod.name for one in seen if one.pod.component == WORKER}
    below: dict[str, list[PodSeen]] = {}
    for one in seen:
        if one.pod.leader in leaders:
            below.setdefault(one.pod.leader, []).append(one)
    return [replace(one, followers=tuple(below.get(one.pod.name, ()))) for one in seen if one.pod.leader not in leaders]


def _condition(condition: Mapping[str, Any], generation: int) -> ConditionSeen:
    return ConditionSeen(
        type=condition["type"],
        status=condition["status"],
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
        stale=0 < condition.get("observedGeneration", 0) < generation,
    )


def _role(role: str, service: Object, pool: Object | None, pods: Sequence[PodSeen]) -> RoleSeen:
    mine = [one for one in pods if one.pod.component == WORKER and one.pod.role == role]
    told = {one["name"]: one for one in service.get("status", {}).get("revisions", ())}
    names = dict.fromkeys([*(name for name, one in told.items() if role in one), *(one.pod.revision for one in mine)])
    revisions = tuple(
        RevisionSeen(
            name=name,
            share=told.get(name, {}).get("share", 0.0),
            pods=tuple(one for one in mine if one.pod.revision == name),
        )
        for name in names
    )
    ready = sum(one.pod.ready for one in mine)
    if pool is None:
        return RoleSeen(
            role=role, wanted=service["spec"].get(role, {}).get("replicas", 1), ready=ready, revisions=revisions
        )
    status = pool.get("status", {})
    return RoleSeen(
        role=role,
        wanted=pool["spec"].get("replicas", 1),
        ready=status.get("readyReplicas", ready),
        revisions=revisions,
    )


def gateways_of(tree: ServiceTree) -> list[PodSeen]:
    return [one for one in tree.others if one.pod.component == GATEWAY]


def workers_of(tree: ServiceTree) -> list[PodSeen]:
    return [one for role in tree.roles for revision in role.revisions for one in revision.pods]
