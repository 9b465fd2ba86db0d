"""Settings of the operator itself, from flags and its environment; the same for all resources that it manages."""

import os
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, get_args

DEFAULT_REGISTRY = "ghcr.io/tandem-serving"

PodPrivilege = Literal["service-accounts", "host-paths", "privileged"]
"""What no pod has unless the administrator of the operator allows resources to ask for it."""

POD_PRIVILEGES: tuple[PodPrivilege, ...] = get_args(PodPrivilege)

ObjectPrivilege = Literal["routes", "monitors"]
"""Objects that the cluster's role `edit` does not let people create: the operator creates them for these people
only if its administrator allows it."""

Privilege = PodPrivilege | ObjectPrivilege
PRIVILEGES: tuple[Privilege, ...] = (*POD_PRIVILEGES, *get_args(ObjectPrivilege))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterApis:
    """Which optional interfaces the cluster serves, found by discovery and not by its version number."""

    pod_disruption_budget: str = "policy/v1"
    pod_monitors: bool = False
    """monitoring.coreos.com/v1 is there."""
    http_routes: bool = False
    """gateway.networking.k8s.io/v1 is there."""
    inference_pools: bool = False
    """inference.networking.k8s.io/v1 is there."""
    leader_worker_sets: bool = False
    """leaderworkerset.x-k8s.io/v1 is there."""
    model_adapters: bool = False
    """The CRD of ModelAdapters is there: helm does not add CRDs to an installed release."""
    model_caches: bool = False
    """The CRD of ModelCaches is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSettings:
    """Defaults for what resources leave open."""

    engine_image: str = f"{DEFAULT_REGISTRY}/engine:0.1.0"
    cuda_engine_image: str = f"{DEFAULT_REGISTRY}/engine:0.1.0-cuda"
    """Of workers on NVIDIA GPUs; `engine_image` is that of workers on CPUs."""
    services_image: str = f"{DEFAULT_REGISTRY}/services:0.1.0"
    redis_image: str = f"{DEFAULT_REGISTRY}/redis:0.1.0"
    apis: ClusterApis = ClusterApis()
    operator_namespace: str = "tandem-system"
    """From where workers may be sent commands to drain or to change their role."""
    canaries: bool = True
    """Whether a revision has to answer a request before it takes over. Without, ready pods count as answers: for
    clusters whose pods the operator cannot reach."""
    allow: Set[Privilege] = frozenset()
    """What of these resources may ask for."""


def own_namespace() -> str:
    """The namespace of the operator's pod, from its manifest; outside of a cluster the default."""
    return os.environ.get("POD_NAMESPACE", OperatorSettings().operator_namespace)


def in_cluster() -> bool:
    """Whether this is a pod, in which the kubelet sets the address of the API server."""
    return "KUBERNETES_SERVICE_HOST" in os.environ
