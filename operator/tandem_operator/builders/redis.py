"""A managed Redis, and how pods reach any Redis.

The managed one is one pod with a password and without a disk: after a restart workers and gateways republish all of its
content.

Pods get the address, password and certificate authority of a managed or external Redis. Password and authority are
files: kubelets renew them when their Secrets change, and both are read at each connect.
"""

import re
from decimal import Decimal

from tandem_engine.base.addresses import Address
from tandem_operator.api.model_service import ExternalRedis, Redis
from tandem_operator.api.pods import Resources, SecretKey
from tandem_operator.builders.containers import (
    Manifest,
    container_port,
    container_security,
    env_of,
    parse_quantity,
    pod_security,
    pod_template,
    resources_of,
    scratch,
    scratch_limit,
    secret_volume,
)
from tandem_operator.builders.naming import redis_name, redis_secret_name, selector_of
from tandem_operator.builders.served import Served

PASSWORD_FOLDER = "/etc/tandem/redis"  # noqa: S105 - a folder
PASSWORD_KEY = "password"  # noqa: S105 - a name
SENTINEL_FOLDER = "/etc/tandem/redis-sentinel"
CA_FOLDER = "/etc/tandem/redis-ca"
CA_FILE = "ca.crt"
PORT = 6379
SENTINEL_PORT = 26379
_PORT = re.compile(r"(?:^[^\[\]:]+|\]):([0-9]+)$")
"""After a name, an IPv4 address, or the bracket behind an IPv6 address."""


def redis_words(redis: Redis, service: str) -> list[str]:
    """Arguments of workers and gateways; none without a Redis. No password is among them."""
    if redis.managed is None and redis.external is None:
        return []
    words = ["--redis-url", redis_url(redis, service)]
    if _password_volume(redis, service) is not None:
        words += ["--redis-password-file", f"{PASSWORD_FOLDER}/{PASSWORD_KEY}"]
    return words


def redis_volumes(redis: Redis, service: str) -> list[tuple[Manifest, Manifest]]:
    """Volumes with their mounts."""
    found = [_password_volume(redis, service)]
    if redis.external is not None and redis.external.ca_secret is not None:
        ca = redis.external.ca_secret
        found.append(secret_volume("redis-ca", ca.name, CA_FOLDER, {ca.key: CA_FILE}))
    if redis.external is not None and redis.external.sentinel_password is not None:
        secret = redis.external.sentinel_password
        found.append(secret_volume("redis-sentinel", secret.name, SENTINEL_FOLDER, {secret.key: PASSWORD_KEY}))
    return [pair for pair in found if pair is not None]


def redis_ports(external: ExternalRedis) -> list[int]:
    """Those that its URL names; of nodes that a cluster or Sentinels name the default one."""
    scheme, _, rest = external.url.partition("://")
    default = SENTINEL_PORT if scheme.endswith("+sentinel") else PORT
    hosts = rest.partition("/")[0].rpartition("@")[2].split(",")
    named = [default if (port := _PORT.search(host)) is None else int(port[1]) for host in hosts]
    return [*named, PORT] if "+" in scheme else named


def redis_url(
    redis: Redis,
    service: str,
    *,
    ca_file: str = f"{CA_FOLDER}/{CA_FILE}",
    sentinel_password_file: str = f"{SENTINEL_FOLDER}/{PASSWORD_KEY}",
) -> str:
    """Its address, for pods that have its certificate authority and the Sentinels' password in these files."""
    if redis.external is None:
        return Address(redis_name(service), PORT).url("/0", scheme="redis")
    external = redis.external
    options: list[str] = []
    if external.ca_secret is not None:
        options.append(f"ssl_ca_certs={ca_file}")
    if external.sentinel_user is not None:
        options.append(f"sentinel_username={external.sentinel_user}")
    if external.sentinel_password is not None:
        options.append(f"sentinel_password_file={sentinel_password_file}")
    return external.url + ("?" + "&".join(options) if options else "")


def _password_volume(redis: Redis, service: str) -> tuple[Manifest, Manifest] | None:
    secret = redis_password(redis, service)
    if secret is None:
        return None
    return secret_volume("redis-password", secret.name, PASSWORD_FOLDER, {secret.key: PASSWORD_KEY})


def redis_password(redis: Redis, service: str) -> SecretKey | None:
    """Where its password is; None without one."""
    if redis.external is not None:
        return redis.external.password
    return None if redis.managed is None else SecretKey(name=redis_secret_name(service), key=PASSWORD_KEY)


SCRIPT = f"""\
printf 'requirepass %s\\n' "$(cat {PASSWORD_FOLDER}/{PASSWORD_KEY})" > /data/redis.conf
exec redis-server /data/redis.conf --port {PORT} --dir /data --save '' --appendonly no \\
  --maxmemory {{megabytes}}mb --maxmemory-policy volatile-ttl
"""
"""The password is written to a file: it appears neither on a command line nor in the environment."""

MEMORY_SHARE = Decimal("0.75")
"""Of the container's memory for data; the rest is for buffers and fragmentation."""

DEFAULT_MEMORY = "1Gi"

SCRATCH_LIMIT = "256Mi"
"""Of its folder, which holds its configuration alone."""


def redis_deployment(service: Served) -> Manifest:
    """The Deployment, without owner references."""
    spec, managed = service.spec, service.spec.redis.managed
    assert managed is not None, "an external Redis is not ours to make"
    labels = service.labels("redis")
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
    labels = service.labels("redis")
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
