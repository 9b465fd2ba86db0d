"""The workers of one role of one revision: a Deployment, or a LeaderWorkerSet if a worker has ranks on several pods.

    LeaderWorkerSet          one per role and revision, as a Deployment for workers of one pod
    group of `nodes` pods    one worker. The leader, index 0, is the worker for all other components; the others are
                             followers
    $(LWS_WORKER_INDEX)      index of the container's pod; $(LWS_LEADER_ADDRESS), the address of the leader

When a container exits, its whole group is replaced, because ranks are lost together (ADR 43). Followers have their own
component label, so that they are never selected as workers.
"""

import msgspec

from tandem_engine.base.addresses import EVERY_ADDRESS
from tandem_operator.api.model_service import ModelServiceSpec, Observability, Role
from tandem_operator.api.types import RoleName
from tandem_operator.builders.adapters import lora_words, with_adapters
from tandem_operator.builders.arguments import check_container, worker_arguments
from tandem_operator.builders.containers import (
    TMP,
    Manifest,
    container_port,
    container_security,
    env_of,
    from_pod,
    http_probe,
    pod_security,
    pod_template,
    resources_of,
    scratch,
    scratch_limit,
    secret_volume,
    value,
)
from tandem_operator.builders.engine_flags import engine_flags
from tandem_operator.builders.kv_storage import storage_volume
from tandem_operator.builders.model_mount import ModelMount, claim_volume, model_mount
from tandem_operator.builders.naming import (
    REVISION_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    deployment_name,
    labels_of,
    selector_of,
)
from tandem_operator.builders.redis import redis_volumes, redis_words
from tandem_operator.builders.served import Served

HEALTH_PORT = 9090

MEETING_PORT = 5757
"""Of a leader, for the other pods of its group."""

CURVE_FOLDER = "/etc/tandem/curve"
CURVE_KEY = "keys.json"

DRAIN_NOTICE_S = 5
"""Load balancers have so long to see that a gateway goes before its port closes."""

STAY_S = DRAIN_NOTICE_S + 5
"""A worker takes requests for so long after its deletion. Gateways and workers may be deleted at the same moment, as
with a namespace or with `--cascade=foreground`: what gateways accept in their notice begins before a worker drains."""

GRACE_AFTER_DRAIN_S = 15
"""After the drain a worker deregisters from Redis and its peers, and its engine has 10 s to end."""

AWAIT_LINKS_S = 20
"""A pod is not ready before the links to the peers that it finds were tested: in a large fleet that takes a while."""

LEAST = {"cpu": "500m", "memory": "1Gi"}
"""Requests of a worker that names neither a request nor a limit."""

SCRATCH_LIMIT = "16Gi"
"""Of compiled kernels and temporary files."""

KERNEL_VOLUME = "kernels"
KERNELS = "/kernels"
"""Where the claim of compiled kernels is mounted. Workers make a folder in it that only their user may write."""

START_PROBES = 360
"""Every five seconds: half an hour to download and load weights before the pod is restarted."""


def worker_deployment(
    service: Served, role: RoleName, revision: str, replicas: int, *, standby: bool = False
) -> Manifest:
    """The Deployment, without owner references. `standby`: its workers stand by until they are offered."""
    labels = worker_labels(service, role, revision)
    rollout = service.spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": deployment_name(service.name, role, revision),
            "namespace": service.namespace,
            "labels": labels,
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": selector_of(labels)},
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": START_PROBES * 5,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "template": worker_template(service, role, labels, standby=standby),
        },
    }


def worker_labels(service: Served, role: RoleName, revision: str) -> dict[str, str]:
    """Of the Deployment and its pods."""
    return labels_of(service.name, "worker", role=role, revision=revision)


def worker_template(service: Served, role: RoleName, labels: dict[str, str], *, standby: bool) -> Manifest:
    """A pod with `labels`: a worker, or one of the pods that a worker is made of."""
    spec, part = service.spec, service.role(role)
    image = service.engine_image(role)
    mount = with_adapters(
        model_mount(spec.model, image=image, weights=True, cached=service.cached), service, image=image
    )
    volumes, mounts = _files(service, role, mount)
    container: Manifest = {
        "name": "worker",
        "image": image,
        "command": ["tandem", "worker"],
        "args": _arguments(service, role, mount),
        "env": _environment(service, role, labels[REVISION_LABEL], standby=standby),
        "ports": [container_port("health", HEALTH_PORT)],
        "resources": _resources(spec, part),
        "securityContext": container_security(),
        "volumeMounts": mounts,
        "startupProbe": http_probe("/live", "health", periodSeconds=5, failureThreshold=START_PROBES),
        "livenessProbe": http_probe("/live", "health", periodSeconds=10, failureThreshold=3, timeoutSeconds=5),
        "readinessProbe": http_probe("/ready", "health", periodSeconds=2, failureThreshold=2, timeoutSeconds=5),
        # SIGTERM begins the drain.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(STAY_S)]}}},
    }
    if spec.images.pull_policy is not None:
        container["imagePullPolicy"] = spec.images.pull_policy
    checks = [check_container(container)] if worker_arguments(service, role) else []
    pod: Manifest = {
        "securityContext": pod_security(spec.security.run_as_user),
        "terminationGracePeriodSeconds": STAY_S + spec.drain_seconds + GRACE_AFTER_DRAIN_S,
        "initContainers": [*checks, *mount.init_containers],
        "containers": [container],
        "volumes": volumes,
        "imagePullSecrets": [{"name": name} for name in spec.images.pull_secrets],
        **_near_prefill(service, role),
    }
    return pod_template(
        labels=labels, overrides=part.pod, spec={key: part for key, part in pod.items() if part not in ([], {})}
    )


def _arguments(service: Served, role: RoleName, mount: ModelMount) -> list[str]:
    spec = service.spec
    words = ["--role", role, "--model", mount.folder, "--served-model-name", service.model_name]
    words += ["--cluster", service.cluster, *redis_words(spec.redis, service.name)]
    words += ["--curve-keys", f"{CURVE_FOLDER}/{CURVE_KEY}"]
    words += ["--health-host", EVERY_ADDRESS, "--health-port", str(HEALTH_PORT)]
    words += ["--drain-timeout", str(spec.drain_seconds), "--await-links", str(AWAIT_LINKS_S), "--log-format", "json"]
    words += traced(spec.observability)
    nodes = service.nodes(role)
    engine = msgspec.structs.replace(service.engine(role), nodes=nodes if nodes > 1 else None)
    words += engine_flags(engine, spec.transfer, mount.folder, device=service.device(role))
    words += lora_words(service)
    words += [] if nodes == 1 else _meeting()
    return words + worker_arguments(service, role)


def _meeting() -> list[str]:
    """Which pod of its group a container is in, and the leader's address: the LeaderWorkerSet controller sets both."""
    words = ["--node-rank", "$(LWS_WORKER_INDEX)", "--dist-init-addr", f"$(LWS_LEADER_ADDRESS):{MEETING_PORT}"]
    # Each pod may have an image and weights to fetch first.
    return [*words, "--dist-init-timeout", str(START_PROBES * 5)]


def traced(observability: Observability) -> list[str]:
    """Where gateways and workers send their spans."""
    endpoint = observability.otlp_traces_endpoint
    ratio = observability.trace_sample_ratio
    words = [] if endpoint is None else ["--otlp-traces-endpoint", endpoint]
    return words if ratio is None else [*words, "--otlp-traces-sample-ratio", f"{ratio:g}"]


def _environment(service: Served, role: RoleName, revision: str, *, standby: bool) -> list[Manifest]:
    spec, part = service.spec, service.role(role)
    # No flags: an engine image of an older release, which a service may name, would not start with one it does not
    # know.
    ours = [
        from_pod("TANDEM_WORKER_ID", "metadata.name"),
        from_pod("TANDEM_HOST", "status.podIP"),
        value("TANDEM_PEER_GROUP", revision),
        value("TANDEM_STANDBY", str(int(standby))),
        value("TANDEM_LOG_LEVEL", spec.observability.log_level),
        value("HOME", TMP),
        # Compiled kernels are kept where the container may write.
        value("TANDEM_CACHE_DIR", f"{TMP}/tandem"),
        value("TRITON_CACHE_DIR", _kernel_folder(service, role)),
    ]
    ucx = [value(name, text) for name, text in sorted(spec.transfer.ucx.items())]
    return ours + ucx + env_of(part.pod.env)


def _files(service: Served, role: RoleName, mount: ModelMount) -> tuple[list[Manifest], list[Manifest]]:
    part = service.role(role)
    pairs = [
        scratch("tmp", TMP, limit=scratch_limit(part.pod, SCRATCH_LIMIT)),
        # Shared memory between ranks, and between workers of one node where UCX uses it.
        scratch("shm", "/dev/shm", limit=str(part.shared_memory), memory=True),  # noqa: S108 - a volume of the pod
        secret_volume("curve", service.curve_secret, CURVE_FOLDER, {CURVE_KEY: CURVE_KEY}),
        *redis_volumes(service.spec.redis, service.name),
        *storage_volume(service.engine(role).storage),
    ]
    claim = _kernel_claim(service, role)
    if claim is not None:
        volume = claim_volume(KERNEL_VOLUME, claim, read_only=False)
        pairs.append((volume, {"name": KERNEL_VOLUME, "mountPath": KERNELS}))
    volumes = [volume for volume, _ in pairs] + list(mount.volumes)
    return volumes, [place for _, place in pairs] + list(mount.mounts)


def _kernel_claim(service: Served, role: RoleName) -> str | None:
    """Of workers on GPUs alone: the others compile no kernels, and need not wait for the volume."""
    return service.spec.kernel_cache_claim if service.device(role) == "cuda" else None


def _kernel_folder(service: Served, role: RoleName) -> str:
    """On a claim, of one user: another cannot write to it, and would not start."""
    if _kernel_claim(service, role) is None:
        return f"{TMP}/triton"
    return f"{KERNELS}/triton-{service.spec.security.run_as_user}"


def _resources(spec: ModelServiceSpec, part: Role) -> Manifest:
    built = resources_of(part.resources, LEAST)
    rdma = spec.transfer.rdma
    if rdma is not None:
        for kind in ("requests", "limits"):
            built[kind] = {**built.get(kind, {}), rdma.resource: str(rdma.count)}
    return built


def _near_prefill(service: Served, role: RoleName) -> Manifest:
    """Affinity of decode pods to prefill pods; affinity set by a user replaces it."""
    topology = service.spec.transfer.topology
    if topology is None or role != "decode":
        return {}
    labels = {SERVICE_LABEL: service.name, ROLE_LABEL: "prefill"}
    term: Manifest = {"labelSelector": {"matchLabels": labels}, "topologyKey": topology.key}
    if topology.required:
        return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}
    preferred = {"weight": 100, "podAffinityTerm": term}
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}}


LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1"

FOLLOWER = "follower"
"""Component of the pods of a group that are not its leader."""


def workers(service: Served, role: RoleName, revision: str, replicas: int, *, standby: bool = False) -> Manifest:
    """A Deployment where a worker is one pod, else a LeaderWorkerSet. `standby`: they stand by until offered."""
    if service.nodes(role) == 1:
        return worker_deployment(service, role, revision, replicas, standby=standby)
    labels = worker_labels(service, role, revision)
    rollout = service.spec.rollout
    following = labels_of(service.name, FOLLOWER, role=role, revision=revision)
    return {
        "apiVersion": LEADER_WORKER_SETS,
        "kind": "LeaderWorkerSet",
        "metadata": {
            "name": deployment_name(service.name, role, revision),
            "namespace": service.namespace,
            "labels": labels,
        },
        "spec": {
            "replicas": replicas,
            # Leaders wait for their followers, so these cannot wait for leaders that are ready.
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "partition": 0,
                    "maxSurge": rollout.max_surge,
                    "maxUnavailable": rollout.max_unavailable,
                },
            },
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": service.nodes(role),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": worker_template(service, role, labels, standby=standby),
                "workerTemplate": worker_template(service, role, following, standby=standby),
            },
        },
    }
