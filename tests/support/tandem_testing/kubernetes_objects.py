"""Objects as an API server tells them: a ModelService, its pools and its pods."""

import base64
from typing import Any

Object = dict[str, Any]

NAMESPACE = "models"
SERVICES = f"/apis/tandem.dev/v1beta1/namespaces/{NAMESPACE}/modelservices"
POOLS = f"/apis/tandem.dev/v1beta1/namespaces/{NAMESPACE}/workerpools"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
KEY_FILE = b'{"public": "' + b"p" * 40 + b'", "secret": "' + b"s" * 40 + b'"}'
CREATED = "2026-01-01T10:00:00Z"


def model_service(name: str = "llama", *, status: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "ModelService",
        "metadata": {"name": name, "namespace": NAMESPACE, "generation": 3},
        "spec": {"model": {"path": "/models/x"}, "prefill": {"replicas": 1}, "decode": {"replicas": 2}, **spec},
        "status": status if status is not None else service_status(),
    }


def service_status(**changes: Any) -> Object:
    return {
        "observedGeneration": 3,
        "endpoint": "http://llama-gateway.models:8000",
        "revision": "5d8f",
        "conditions": [
            condition("Ready", "False", "Progressing", "revision 5d8f is starting workers"),
            condition("PrefillWorkersReady", "True", "AllReady", "1 of 1 prefill workers are ready"),
            condition("DecodeWorkersReady", "True", "SomeReady", "1 of 2 decode workers are ready"),
        ],
        "revisions": [
            {"name": "5d8f", "share": 1.0, "prefill": {"desired": 1, "ready": 1}, "decode": {"desired": 2, "ready": 1}}
        ],
        **changes,
    }


def condition(kind: str, status: str, reason: str, message: str = "", generation: int = 3) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": CREATED,
    }


def worker_pool(role: str, replicas: int, *, ready: int = 0, service: str = "llama") -> Object:
    return {
        "apiVersion": "tandem.dev/v1beta1",
        "kind": "WorkerPool",
        "metadata": {"name": f"{service}-{role}", "namespace": NAMESPACE},
        "spec": {"serviceName": service, "role": role, "replicas": replicas},
        "status": {"replicas": replicas, "readyReplicas": ready},
    }


def pod(name: str, *, component: str = "worker", role: str = "", ready: bool = True, **changes: Any) -> Object:
    """`changes`: of its status. A worker of revision 5d8f, or a gateway."""
    labels = {
        "app.kubernetes.io/managed-by": "tandem-operator",
        "app.kubernetes.io/component": component,
        "tandem.dev/service": "llama",
    }
    if role:
        labels |= {"tandem.dev/role": role, "tandem.dev/revision": "5d8f"}
    ports = [{"name": "health", "containerPort": 9090}]
    if component == "gateway":
        ports = [{"name": "http", "containerPort": 8000}, {"name": "admin", "containerPort": 8001}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": labels,
            "uid": f"uid-{name}",
            "creationTimestamp": CREATED,
        },
        "spec": {
            "nodeName": "node-0",
            "terminationGracePeriodSeconds": 75,
            "containers": [{"name": component, "ports": ports}],
        },
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
            "containerStatuses": [{"name": component, "restartCount": 0, "state": {"running": {}}}],
            **changes,
        },
    }


def follower(name: str, *, leader: str = "llama-decode-5d8f-0", ready: bool = True) -> Object:
    """A pod of a decode worker of several pods, as the LeaderWorkerSet controller makes it; none is its leader."""
    made = pod(name, component="follower", role="decode", ready=ready)
    made["metadata"]["annotations"] = {"leaderworkerset.sigs.k8s.io/leader-name": leader}
    return made


def deployment_pods() -> list[Object]:
    """Of `llama`: a prefill worker, two decode workers of which one cannot be scheduled, a gateway, a Redis."""
    waiting = pod("llama-decode-5d8f-b", role="decode", ready=False, phase="Pending", containerStatuses=[])
    waiting["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "False",
            "message": "0/3 nodes are available",
        }
    ]
    return [
        pod("llama-prefill-5d8f-a", role="prefill"),
        pod("llama-decode-5d8f-a", role="decode"),
        waiting,
        pod("llama-gateway-7c", component="gateway"),
        pod("llama-redis-0", component="redis"),
    ]


def deployed(**spec: Any) -> dict[str, Any]:
    """Everything of `llama` by path, for an API server."""
    service, pods = model_service(**spec), deployment_pods()
    return {
        SERVICES: [service],
        f"{SERVICES}/llama": service,
        POOLS: [worker_pool("prefill", 1, ready=1), worker_pool("decode", 2, ready=1)],
        PODS: pods,
        f"{SECRETS}/llama-curve": {"data": {"keys.json": base64.b64encode(KEY_FILE).decode("ascii")}},
        **{f"{PODS}/{each['metadata']['name']}": each for each in pods},
    }
