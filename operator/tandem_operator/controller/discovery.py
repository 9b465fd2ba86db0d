"""Which interfaces the cluster serves, asked once at the start: never guessed from its version."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.kinds import (
    BUDGETS,
    DEPLOYMENT,
    HTTP_ROUTE,
    INFERENCE_POOL,
    LEADER_WORKER_SET,
    MODEL_SERVICE,
    NETWORK_POLICY,
    POD,
    POD_MONITOR,
    SERVICE,
    WORKER_POOL,
    Kind,
)
from tandem_operator.settings import ClusterApis

logger = logging.getLogger(__name__)

RETRY_S = 5.0


async def discover(cluster: Cluster) -> ClusterApis:
    """Optional interfaces. Raises `ApiError` when the API server does not answer."""
    budgets = [kind for kind in BUDGETS if await cluster.serves(kind)]
    return ClusterApis(
        pod_disruption_budget=(budgets or list(BUDGETS))[0].api_version,
        pod_monitors=await cluster.serves(POD_MONITOR),
        http_routes=await cluster.serves(HTTP_ROUTE),
        inference_pools=await cluster.serves(INFERENCE_POOL),
        leader_worker_sets=await cluster.serves(LEADER_WORKER_SET),
    )


async def wait_for_cluster(cluster: Cluster, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> ClusterApis:
    """Waits for the API server and for both custom resources, saying what for; then as `discover`."""
    while True:
        try:
            missing = [kind.plural for kind in (MODEL_SERVICE, WORKER_POOL) if not await cluster.serves(kind)]
            if not missing:
                return await discover(cluster)
            logger.warning("waiting for the CRDs of %s: kubectl apply -f charts/tandem/crds", " and ".join(missing))
        except ApiError as error:
            logger.warning("waiting for the API server: %s", error)
        await pause(RETRY_S)


def watched_kinds(apis: ClusterApis) -> tuple[Kind, ...]:
    """Everything that reconciles read or write, but Secrets, which are looked up by name."""
    budget = next(kind for kind in BUDGETS if kind.api_version == apis.pod_disruption_budget)
    offered = (
        (HTTP_ROUTE, apis.http_routes),
        (INFERENCE_POOL, apis.inference_pools),
        (POD_MONITOR, apis.pod_monitors),
        (LEADER_WORKER_SET, apis.leader_worker_sets),
    )
    optional = [kind for kind, there in offered if there]
    return (MODEL_SERVICE, WORKER_POOL, DEPLOYMENT, POD, SERVICE, NETWORK_POLICY, budget, *optional)
