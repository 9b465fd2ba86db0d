"""Pods that serve HTTP from the services image: gateways, and routers of an InferencePool.

Each has the model's tokenizer, the key that engines know it by, what Redis wants, and the API keys, if there are any.
"""

from collections.abc import Sequence

from tandem_operator.api.pods import PodOverrides, Resources
from tandem_operator.builders.containers import (
    TMP,
    Manifest,
    container_security,
    env_of,
    http_probe,
    pod_security,
    pod_template,
    resources_of,
    scratch,
    scratch_limit,
    secret_volume,
    spread_apart,
    value,
)
from tandem_operator.builders.model_mount import ModelMount
from tandem_operator.builders.naming import Labels
from tandem_operator.builders.redis_access import redis_volumes
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import CURVE_FOLDER, CURVE_KEY

KEYS_FOLDER = "/etc/tandem/keys"
SCRATCH_LIMIT = "4Gi"


def services_pod(
    service: Served,
    labels: Labels,
    mount: ModelMount,
    *,
    name: str,
    arguments: Sequence[str],
    ports: Sequence[Manifest],
    resources: Resources,
    overrides: PodOverrides,
    grace_s: int,
    environment: Sequence[Manifest] = (),
) -> Manifest:
    """The pod template of `tandem NAME`, whose port "http" answers /live and /ready.

    Args:
        grace_s: from SIGTERM to SIGKILL.
        environment: variables beside those that every such pod has and those of `overrides`.
    """
    spec = service.spec
    pairs = _volumes(service, overrides)
    container: Manifest = {
        "name": name,
        "image": service.services_image,
        "command": ["tandem", name],
        "args": list(arguments),
        "env": [
            *environment,
            value("TANDEM_LOG_LEVEL", spec.observability.log_level),
            value("HOME", TMP),
            *env_of(overrides.env),
        ],
        "ports": list(ports),
        "resources": resources_of(resources),
        "securityContext": container_security(),
        "volumeMounts": [place for _, place in pairs] + list(mount.mounts),
        "startupProbe": http_probe("/live", "http", periodSeconds=2, failureThreshold=150),
        "livenessProbe": http_probe("/live", "http", periodSeconds=10, failureThreshold=3, timeoutSeconds=5),
        "readinessProbe": http_probe("/ready", "http", periodSeconds=2, failureThreshold=2, timeoutSeconds=5),
    }
    if spec.images.pull_policy is not None:
        container["imagePullPolicy"] = spec.images.pull_policy
    pod: Manifest = {
        "topologySpreadConstraints": spread_apart(labels),
        "securityContext": pod_security(spec.security.run_as_user),
        "terminationGracePeriodSeconds": grace_s,
        "initContainers": list(mount.init_containers),
        "containers": [container],
        "volumes": [volume for volume, _ in pairs] + list(mount.volumes),
        "imagePullSecrets": [{"name": secret} for secret in spec.images.pull_secrets],
    }
    return pod_template(labels=labels, overrides=overrides, spec={key: part for key, part in pod.items() if part != []})


def _volumes(service: Served, overrides: PodOverrides) -> list[tuple[Manifest, Manifest]]:
    """Each with its place in the container."""
    spec = service.spec
    pairs = [
        scratch("tmp", TMP, limit=scratch_limit(overrides, SCRATCH_LIMIT)),
        secret_volume("curve", service.curve_secret, CURVE_FOLDER, {CURVE_KEY: CURVE_KEY}),
    ]
    pairs += redis_volumes(spec.redis, service.name)
    if spec.gateway.auth_secret is not None:
        pairs.append(secret_volume("api-keys", spec.gateway.auth_secret, KEYS_FOLDER))
    return pairs
