"""An InferencePool of a ModelService, for Inference Gateways: its endpoints are the gateways, its picker is our router.

    client ─▶ Inference Gateway ──body──▶ router: chooses workers, reserves, names a gateway ─▶ gateway ─▶ workers

docs/routing.md ("Inference Gateways") has the protocol; docs/adr/0020 says why the endpoints are gateways.
"""

from tandem_operator.api.gateway import InferencePool
from tandem_operator.builders.containers import (
    TMP,
    Manifest,
    container_port,
    container_security,
    env_of,
    http_probe,
    pod_security,
    pod_template,
    resources_of,
    scratch,
    secret_volume,
    value,
)
from tandem_operator.builders.gateway import INFERENCE_GROUP, KEYS_FOLDER, gateway_labels
from tandem_operator.builders.gateway import PORT as GATEWAY_PORT
from tandem_operator.builders.model_mount import ModelMount, model_mount
from tandem_operator.builders.naming import Labels, gateways_name, labels_of, router_name, selector_of
from tandem_operator.builders.redis_access import redis_volumes, redis_words
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import CURVE_FOLDER, CURVE_KEY

API_VERSION = f"{INFERENCE_GROUP}/v1"
PORT = 8100
GRPC_PORT = 9002
DRAIN_NOTICE_S = 5
GRACE_S = 45
"""After its notice a router lets exchanges that run end for up to 30 s."""


def router_labels(service: str) -> Labels:
    """Of its objects and pods."""
    return labels_of(service, "router")


def inference_pool(service: Served) -> list[Manifest]:
    """Router, its Service, a headless one of the gateways, and the pool; none where none is wanted."""
    wanted = service.spec.gateway.inference_pool
    if wanted is None:
        return []
    return [_deployment(service, wanted), _router_service(service), _gateways_service(service), _pool(service, wanted)]


def _pool(service: Served, wanted: InferencePool) -> Manifest:
    picker = {"name": router_name(service.name), "port": {"number": GRPC_PORT}, "failureMode": wanted.failure_mode}
    spec = {
        "selector": {"matchLabels": selector_of(gateway_labels(service.name))},
        "targetPorts": [{"number": GATEWAY_PORT}],
        "endpointPickerRef": picker,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "InferencePool",
        "metadata": _metadata(service, service.name, gateway_labels(service.name)),
        "spec": spec,
    }


def _router_service(service: Served) -> Manifest:
    labels = router_labels(service.name)
    grpc = {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc", "protocol": "TCP", "appProtocol": "http2"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, router_name(service.name), labels),
        "spec": {"type": "ClusterIP", "selector": selector_of(labels), "ports": [grpc]},
    }


def _gateways_service(service: Served) -> Manifest:
    """Its name stands for the addresses of all gateways: the router asks each of them."""
    labels = gateway_labels(service.name)
    port = {"name": "http", "port": GATEWAY_PORT, "targetPort": "http", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, gateways_name(service.name), labels),
        "spec": {"clusterIP": "None", "selector": selector_of(labels), "ports": [port]},
    }


def _deployment(service: Served, wanted: InferencePool) -> Manifest:
    labels = router_labels(service.name)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(service, router_name(service.name), labels),
        "spec": {
            "replicas": wanted.replicas,
            "selector": {"matchLabels": selector_of(labels)},
            "revisionHistoryLimit": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": _template(service, wanted, labels),
        },
    }


def _template(service: Served, wanted: InferencePool, labels: Labels) -> Manifest:
    spec = service.spec
    mount = model_mount(spec.model, image=service.services_image, weights=False)
    pairs = [
        scratch("tmp", TMP),
        secret_volume("curve", service.curve_secret, CURVE_FOLDER, {CURVE_KEY: CURVE_KEY}),
        *redis_volumes(spec.redis, service.name),
    ]
    if spec.gateway.auth_secret is not None:
        pairs.append(secret_volume("api-keys", spec.gateway.auth_secret, KEYS_FOLDER))
    container: Manifest = {
        "name": "router",
        "image": service.services_image,
        "command": ["tandem", "router"],
        "args": _arguments(service, mount),
        "env": [
            value("TANDEM_LOG_LEVEL", spec.observability.log_level),
            value("HOME", TMP),
            *env_of(wanted.pod.env),
        ],
        "ports": [container_port("http", PORT), container_port("grpc", GRPC_PORT)],
        "resources": resources_of(wanted.resources),
        "securityContext": container_security(),
        "volumeMounts": [place for _, place in pairs] + list(mount.mounts),
        "startupProbe": http_probe("/live", "http", periodSeconds=2, failureThreshold=150),
        "livenessProbe": http_probe("/live", "http", periodSeconds=10, failureThreshold=3, timeoutSeconds=5),
        "readinessProbe": http_probe("/ready", "http", periodSeconds=2, failureThreshold=2, timeoutSeconds=5),
    }
    if spec.images.pull_policy is not None:
        container["imagePullPolicy"] = spec.images.pull_policy
    pod: Manifest = {
        "securityContext": pod_security(spec.security.run_as_user),
        "terminationGracePeriodSeconds": DRAIN_NOTICE_S + GRACE_S,
        "initContainers": list(mount.init_containers),
        "containers": [container],
        "volumes": [volume for volume, _ in pairs] + list(mount.volumes),
        "imagePullSecrets": [{"name": name} for name in spec.images.pull_secrets],
    }
    return pod_template(labels=labels, overrides=wanted.pod, spec={key: part for key, part in pod.items() if part})


def _arguments(service: Served, mount: ModelMount) -> list[str]:
    spec = service.spec
    gateways = f"{gateways_name(service.name)}.{service.namespace}.svc:{GATEWAY_PORT}"
    names = ",".join((service.model_name, *spec.aliases))
    words = ["--model", f"{names}={mount.folder}", "--gateway", gateways]
    words += ["--host", "0.0.0.0", "--port", str(PORT), "--grpc-port", str(GRPC_PORT)]  # noqa: S104 - of the pod
    words += ["--cluster", service.cluster, *redis_words(spec.redis, service.name)]
    words += ["--curve-keys", f"{CURVE_FOLDER}/{CURVE_KEY}", "--log-format", "json"]
    words += ["--drain-notice", str(DRAIN_NOTICE_S)]
    if spec.gateway.auth_secret is not None:
        words += ["--api-keys", KEYS_FOLDER]
    if spec.gateway.router_policy is not None:
        words += ["--router-policy", spec.gateway.router_policy]
    return words


def _metadata(service: Served, name: str, labels: Labels) -> Manifest:
    return {"name": name, "namespace": service.namespace, "labels": labels}
