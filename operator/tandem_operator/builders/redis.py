"""A managed Redis: one pod with a password, without a disk. Workers and gateways tell a new one all it has to know."""

from decimal import Decimal

from tandem_operator.api.pods import Resources
from tandem_operator.builders.containers import (
    Manifest,
    container_port,
    container_security,
    env_of,
    pod_security,
    pod_template,
    resources_of,
    scratch,
    scratch_limit,
    secret_volume,
)
from tandem_operator.builders.naming import labels_of, redis_name, redis_secret_name, selector_of
from tandem_operator.builders.quantities import parse_quantity
from tandem_operator.builders.redis_access import PASSWORD_FOLDER, PASSWORD_KEY, PORT
from tandem_operator.builders.served import Served

SCRIPT = f"""\
printf 'requirepass %s\\n' "$(cat {PASSWORD_FOLDER}/{PASSWORD_KEY})" > /data/redis.conf
exec redis-server /data/redis.conf --port {PORT} --dir /data --save '' --appendonly no \\
  --maxmemory {{megabytes}}mb --maxmemory-policy volatile-ttl
"""
"""The password is put into a file: it stands neither on a command line nor in the environment."""

MEMORY_SHARE = Decimal("0.75")
"""Of the container's memory for data; the rest is for buffers and fragmentation."""

DEFAULT_MEMORY = "1Gi"

SCRATCH_LIMIT = "256Mi"
"""Of its folder, which holds its configuration alone."""


def redis_labels(service: str) -> dict[str, str]:
    """Of its objects and its pod."""
    return labels_of(service, "redis")


def redis_deployment(service: Served) -> Manifest:
    """The Deployment, without owner references."""
    spec, managed = service.spec, service.spec.redis.managed
    assert managed is not None, "an external Redis is not ours to make"
    labels = redis_labels(service.name)
    volumes, mounts = zip(
        scratch("data", "/data", limit=scratch_limit(managed.pod, SCRATCH_LIMIT)),
        secret_volume("password", redis_secret_name(service.name), PASSWORD_FOLDER, {PASSWORD_KEY: PASSWORD_KEY}),
        strict=True,
    )
    container: Manifest = {
        "name": "redis",
        "image": spec.images.redis,
        "command": ["sh", "-c", SCRIPT.format(megabytes=_megabytes(managed.resources))],
        "ports": [container_port("redis", PORT)],
        "resources": resources_of(managed.resources),
        "securityContext": container_security(),
        "volumeMounts": list(mounts),
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 2},
        "livenessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 10, "failureThreshold": 6},
    }
    if managed.pod.env:
        container["env"] = env_of(managed.pod.env)
    pod: Manifest = {
        "securityContext": pod_security(spec.security.run_as_user),
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": list(volumes),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": redis_name(service.name), "namespace": service.namespace, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": selector_of(labels)},
            # Two at once would each hold half of the truth.
            "strategy": {"type": "Recreate"},
            "template": pod_template(labels=labels, overrides=managed.pod, spec=pod),
        },
    }


def redis_service(service: Served) -> Manifest:
    """The Service: its address for gateways and workers."""
    labels = redis_labels(service.name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": redis_name(service.name), "namespace": service.namespace, "labels": labels},
        "spec": {
            "type": "ClusterIP",
            "selector": selector_of(labels),
            "ports": [{"name": "redis", "port": PORT, "targetPort": "redis", "protocol": "TCP"}],
        },
    }


def _megabytes(resources: Resources) -> int:
    limit = resources.limits.get("memory", resources.requests.get("memory", DEFAULT_MEMORY))
    return max(16, int(parse_quantity(limit) * MEMORY_SHARE) >> 20)
