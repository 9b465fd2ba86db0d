"""`flip`, `drain` and `scale`: the commands that change a deployment."""

import argparse
import base64
import sys
import time
from collections.abc import Callable

import httpx

from tandem_engine.base.errors import ConfigError
from tandem_operator.builders.naming import SERVICE_LABEL, curve_secret_name
from tandem_operator.builders.worker import CURVE_KEY
from tandem_operator.telemetry.worker_control import order_token
from tandem_services.cli.k8s.cluster import Cluster, ClusterError, Object, pod_client
from tandem_services.cli.k8s.pods import HEALTH_PORT, WORKER, Pod, ask, own_pod, workers_among
from tandem_services.common.errors import RemoteError

FLIP_S = 30.0
"""The worker answers once its engine has the order; what runs moves later."""

LOOK_S = 2.0

PATIENCE_S = 60.0
"""After a pod's grace period, until the kubelet must have ended it."""

TOO_MANY_REQUESTS = 429


def flip(args: argparse.Namespace) -> int:
    with Cluster.of(args) as cluster:
        pod = own_pod(cluster, args.pod)
        _require_worker(Pod.of(pod))
        token = _order_token(cluster, pod)
        try:
            headers = {"Authorization": f"Bearer {token}"}
            with pod_client(cluster.access, pod, HEALTH_PORT, headers=headers) as client:
                response = client.post("/role", json={"role": args.role}, timeout=FLIP_S)
        except (httpx.HTTPError, LookupError) as error:
            raise RemoteError(f"cannot reach pod {args.pod}: {error}") from error
        if not response.is_success:
            print(f"pod {args.pod} rejected the command: {response.text[:512]}", file=sys.stderr)
            return 1
        print(f"{args.pod} serves as {args.role} from now on; after a restart as {Pod.of(pod).role}")
        _warn_of_autoscaler(cluster, pod)
    return 0


def _order_token(cluster: Cluster, pod: Object) -> str:
    """Of the key file of the pod's ModelService. Raises `RemoteError` where its Secret holds none."""
    service = pod["metadata"]["labels"][SERVICE_LABEL]
    [found] = cluster.services(service)
    name = found["spec"].get("security", {}).get("curveSecret") or curve_secret_name(service)
    data = cluster.secret(name).get("data", {})
    try:
        return order_token(base64.b64decode(data.get(CURVE_KEY, "")))
    except ValueError as error:
        raise RemoteError(f"Secret {name}: {error}") from error


def _require_worker(pod: Pod) -> None:
    if pod.leader:
        raise RemoteError(
            f"pod {pod.name} is one of the pods of worker {pod.leader}, which have one role together: flip {pod.leader}"
        )
    if pod.component != WORKER:
        raise RemoteError(f"pod {pod.name} is a {pod.component}: only workers have roles")


def _warn_of_autoscaler(cluster: Cluster, pod: Object) -> None:
    [service] = cluster.services(pod["metadata"]["labels"][SERVICE_LABEL])
    scaling = service["spec"].get("autoscaling", {})
    if scaling.get("mode") == "internal" and scaling.get("flipRoles", True):
        print(
            "the autoscaler flips roles of this ModelService and may take it back: `spec.autoscaling.flipRoles: false` "
            "leaves them to you",
            file=sys.stderr,
        )


def drain(args: argparse.Namespace) -> int:
    with Cluster.of(args) as cluster:
        pod = own_pod(cluster, args.pod)
        try:
            cluster.evict(args.pod)
        except ClusterError as error:
            if error.status != TOO_MANY_REQUESTS:
                raise
            print(f"{error}. Its disruption budget forbids it: try again later, or scale up", file=sys.stderr)
            return 1
        print(f"{_drain_owner(Pod.of(pod))}: running requests migrate to other workers or finish")
        return 0 if args.no_wait else until_gone(cluster, pod)


def _drain_owner(pod: Pod) -> str:
    return f"{pod.name} is draining, with all pods of worker {pod.leader}" if pod.leader else f"{pod.name} is draining"


def until_gone(cluster: Cluster, pod: Object, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Print what is left until the pod is gone; 1 when it is not within its grace period and some time."""
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    looks = round((pod["spec"].get("terminationGracePeriodSeconds", 30) + PATIENCE_S) / LOOK_S)
    printed = ""
    worker = _worker_of(cluster, pod)
    for _ in range(looks):
        if _is_gone(cluster, name, uid):
            print(f"{name} is gone")
            return 0
        left = _left(cluster, worker)
        if left and left != printed:
            print(left)
            printed = left
        sleep(LOOK_S)
    print(f"{name} still exists: `kubectl describe pod {name}` may show the reason", file=sys.stderr)
    return 1


def _is_gone(cluster: Cluster, name: str, uid: str) -> bool:
    try:
        return bool(cluster.pod(name)["metadata"]["uid"] != uid)
    except ClusterError as error:
        if error.status == 404:
            return True
        raise


def _worker_of(cluster: Cluster, pod: Object) -> Object | None:
    """The pod to query for what is left: the leader of a follower, if it is there."""
    leader = Pod.of(pod).leader
    if not leader:
        return pod
    try:
        return cluster.pod(leader)
    except ClusterError as error:
        if error.status == 404:
            return None
        raise


def _left(cluster: Cluster, worker: Object | None) -> str:
    """What it still has to do; "" when it cannot be queried."""
    for figures in workers_among(ask(cluster.access, [] if worker is None else [worker])).values():
        return f"  {figures.running} running, {figures.waiting} waiting, {figures.moving} with KV on its way"
    return ""


def scale(args: argparse.Namespace) -> int:
    wanted = {role: number for role in ("prefill", "decode") if (number := getattr(args, role)) is not None}
    if not wanted:
        raise ConfigError("say how many: --prefill N, --decode N, or both")
    with Cluster.of(args) as cluster:
        [service] = cluster.services(args.name)
        match service["spec"].get("autoscaling", {}).get("mode", "none"):
            case "internal":
                raise ConfigError(
                    f"spec.autoscaling.mode of {args.name} is internal: the autoscaler sets the number of workers. "
                    "Change spec.prefill.scaling and spec.decode.scaling (minReplicas, maxReplicas), or the mode"
                )
            case "external":
                for pool in _pools(cluster, args.name, wanted):
                    cluster.scale_pool(pool["metadata"]["name"], wanted[pool["spec"]["role"]])
            case _:
                cluster.patch_service(args.name, {"spec": {role: {"replicas": n} for role, n in wanted.items()}})
        print(f"{args.name}: {', '.join(f'{number} {role}' for role, number in wanted.items())} wanted")
    return 0


def _pools(cluster: Cluster, service: str, wanted: dict[str, int]) -> list[Object]:
    """Those of the roles that are wanted. Raises `RemoteError` when one is not there yet."""
    found = [
        pool
        for pool in cluster.pools(cluster.namespace)
        if pool["spec"].get("serviceName") == service and pool["spec"].get("role") in wanted
    ]
    missing = wanted.keys() - {pool["spec"]["role"] for pool in found}
    if missing:
        raise RemoteError(f"{service} has no WorkerPool of {', '.join(sorted(missing))} yet: does the operator run?")
    return found
