"""An InferencePool for Inference Gateways: its endpoints are the gateways, its endpoint picker is our router.

    client ─▶ Inference Gateway ──body──▶ router: chooses workers, reserves, names a gateway ─▶ gateway ─▶ workers

docs/routing.md ("Inference Gateways") describes the protocol; docs/adr/0020 explains why the endpoints are gateways.
"""

from tandem_engine.base.addresses import EVERY_ADDRESS, Address
from tandem_operator.api.gateway import InferencePool
from tandem_operator.builders.containers import Manifest, container_port
from tandem_operator.builders.gateway import INFERENCE_GROUP, KEYS_FOLDER, gateway_labels, services_pod
from tandem_operator.builders.gateway import PORT as GATEWAY_PORT
from tandem_operator.builders.model_mount import ModelMount, gateway_mount
from tandem_operator.builders.naming import Labels, gateways_name, labels_of, router_name, selector_of
from tandem_operator.builders.redis import redis_words
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
    """Its name stands for the addresses of all gateways: the router probes each of them."""
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
    mount = gateway_mount(spec.model, spec.gateway.tokenizer, image=service.services_image, cached=service.cached)
    return services_pod(
        service,
        labels,
        mount,
        name="router",
        arguments=_arguments(service, mount),
        ports=[container_port("http", PORT), container_port("grpc", GRPC_PORT)],
        resources=wanted.resources,
        overrides=wanted.pod,
        grace_s=DRAIN_NOTICE_S + GRACE_S,
    )


def _arguments(service: Served, mount: ModelMount) -> list[str]:
    spec = service.spec
    gateways = str(Address(f"{gateways_name(service.name)}.{service.namespace}.svc", GATEWAY_PORT))
    names = ",".join((service.model_name, *spec.aliases))
    words = ["--model", f"{names}={mount.folder}", "--gateway", gateways]
    words += ["--host", EVERY_ADDRESS, "--port", str(PORT), "--grpc-port", str(GRPC_PORT)]
    words += ["--allowed-hosts", f"{router_name(service.name)}.{service.namespace}"]
    words += ["--cluster", service.cluster, *redis_words(spec.redis, service.name)]
    words += ["--curve-keys", f"{CURVE_FOLDER}/{CURVE_KEY}", "--log-format", "json"]
    words += ["--drain-notice", str(DRAIN_NOTICE_S)]
    if spec.gateway.auth_secret is not None:
        words += ["--api-keys", KEYS_FOLDER]
    if spec.gateway.router_policy is not None:
        words += ["--router-policy", spec.gateway.router_policy]
    if not spec.gateway.parse_special_tokens:
        words.append("--no-parse-special-tokens")
    return words


def _metadata(service: Served, name: str, labels: Labels) -> Manifest:
    return {"name": name, "namespace": service.namespace, "labels": labels}
