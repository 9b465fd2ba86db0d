"""The gateway of a ModelService, or of a ModelGateway: Deployment, Service and, if requested, an HTTPRoute.

`services_pod` is the pod of everything that serves HTTP from the services image: gateways, and routers of an
InferencePool. It has the key file of the deployment, the settings of Redis, the API keys if there are any, and the
model's tokenizer, unless the workers send it to the gateway.
"""

from collections.abc import Iterator, Sequence

import msgspec

from tandem_engine.base.addresses import EVERY_ADDRESS
from tandem_operator.api.gateway import GatewayLimits, RouteTimeouts
from tandem_operator.api.pods import PodOverrides, Resources
from tandem_operator.api.slo import Slo
from tandem_operator.builders.arguments import check_container
from tandem_operator.builders.cells import cell_volumes, cell_words
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
    spread_apart,
    value,
)
from tandem_operator.builders.model_mount import ModelMount, gateway_mount
from tandem_operator.builders.models_file import shared_mount
from tandem_operator.builders.naming import Labels, gateway_name, labels_of, selector_of
from tandem_operator.builders.redis import redis_volumes, redis_words
from tandem_operator.builders.served import FROM_ZERO_S, Served, may_be_zero
from tandem_operator.builders.worker import CURVE_FOLDER, CURVE_KEY, DRAIN_NOTICE_S, traced

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
    volumes: Sequence[tuple[Manifest, Manifest]] = (),
    checked: bool = False,
) -> Manifest:
    """The pod template of `tandem NAME`, whose port "http" answers /live and /ready.

    Args:
        grace_s: from SIGTERM to SIGKILL.
        environment: variables in addition to those that every such pod has and those of `overrides`.
        volumes: with their mounts, in addition to those that every such pod has.
        checked: an init container checks `arguments`, some of which a user wrote.
    """
    spec = service.spec
    pairs = [*_volumes(service, overrides), *volumes]
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
        "initContainers": [*([check_container(container)] if checked else []), *mount.init_containers],
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


PORT = 8000
ADMIN_PORT = 8001
INFERENCE_GROUP = "inference.networking.k8s.io"


def gateway_labels(service: str) -> dict[str, str]:
    """Of its objects and pods."""
    return labels_of(service, "gateway")


def gateway_deployment(service: Served) -> Manifest:
    """The Deployment, without owner references."""
    labels = service.labels("gateway")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": gateway_name(service.name), "namespace": service.namespace, "labels": labels},
        "spec": {
            "replicas": service.spec.gateway.replicas,
            "selector": {"matchLabels": selector_of(labels)},
            "revisionHistoryLimit": 2,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": _template(service, labels),
        },
    }


def gateway_service(service: Served) -> Manifest:
    """The Service: the address of the model."""
    wanted = service.spec.gateway.service
    labels = service.labels("gateway")
    metadata: Manifest = {"name": gateway_name(service.name), "namespace": service.namespace, "labels": labels}
    if wanted.annotations:
        metadata["annotations"] = wanted.annotations
    port = {"name": "http", "port": wanted.port, "targetPort": "http", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"type": wanted.type, "selector": selector_of(labels), "ports": [port]},
    }


def http_route(service: Served, *, to_pool: bool = False) -> Manifest | None:
    """The HTTPRoute, to the Service or to the InferencePool; None when none is wanted."""
    gateway = service.spec.gateway
    route = gateway.http_route
    if route is None:
        return None
    backend: Manifest = {"name": gateway_name(service.name), "port": gateway.service.port}
    if to_pool:
        backend = {"group": INFERENCE_GROUP, "kind": "InferencePool", "name": service.name}
    body: Manifest = {
        "parentRefs": [msgspec.to_builtins(parent) for parent in route.parent_refs],
        # The defaults of a Gateway would end a stream that takes longer.
        "rules": [{"backendRefs": [backend], "timeouts": _timeouts(route.timeouts)}],
    }
    if route.hostnames:
        body["hostnames"] = route.hostnames
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {
            "name": gateway_name(service.name),
            "namespace": service.namespace,
            "labels": service.labels("gateway"),
        },
        "spec": body,
    }


def _timeouts(wanted: RouteTimeouts) -> Manifest:
    return {"request": wanted.request, "backendRequest": wanted.backend_request}


def _template(service: Served, labels: dict[str, str]) -> Manifest:
    spec = service.spec
    shared = shared_mount(service.name, service.claims) if service.shared else None
    mount = shared or gateway_mount(
        spec.model, spec.gateway.tokenizer, image=service.services_image, cached=service.cached
    )
    return services_pod(
        service,
        labels,
        mount,
        name="gateway",
        arguments=_arguments(service, mount),
        checked=bool(spec.gateway.args),
        volumes=cell_volumes(service),
        # As a variable, because images of earlier releases refuse flags that they do not know.
        environment=[from_pod("TANDEM_HOST", "status.podIP"), value("TANDEM_REPLACED_WORKERS", "1")],
        ports=[container_port("http", PORT), container_port("admin", ADMIN_PORT)],
        resources=spec.gateway.resources,
        overrides=spec.gateway.pod,
        # Streams under way may take as long as on a worker.
        grace_s=spec.drain_seconds + DRAIN_NOTICE_S + 10,
    )


def _arguments(service: Served, mount: ModelMount) -> list[str]:
    spec = service.spec
    words = ["--model", mount.folder, "--served-model-name", service.model_name, *spec.aliases]
    if service.shared:
        words = ["--models", mount.folder, "--independent-models"]
    words += ["--host", EVERY_ADDRESS, "--port", str(PORT)]
    words += ["--admin-host", EVERY_ADDRESS, "--admin-port", str(ADMIN_PORT)]
    if spec.gateway.processes is not None:
        words += ["--processes", str(spec.gateway.processes)]
    words += ["--cluster", service.cluster, *redis_words(spec.redis, service.name), *cell_words(service)]
    words += ["--curve-keys", f"{CURVE_FOLDER}/{CURVE_KEY}", "--log-format", "json"]
    words += ["--drain-notice", str(DRAIN_NOTICE_S), "--drain-timeout", str(spec.drain_seconds)]
    if may_be_zero(spec):
        words += ["--from-zero-timeout", str(FROM_ZERO_S)]
    if spec.gateway.auth_secret is not None:
        words += ["--api-keys", KEYS_FOLDER]
    if spec.gateway.router_policy is not None:
        words += ["--router-policy", spec.gateway.router_policy]
    words += ["--allowed-hosts", *allowed_hosts(service)]
    if spec.gateway.strict_fields:
        words.append("--strict-fields")
    if not spec.gateway.parse_special_tokens:
        words.append("--no-parse-special-tokens")
    words += traced(spec.observability)
    words += [*_limits(spec.gateway.limits), *_parsers_and_routing(service), *_objectives(spec.slo)]
    return [*words, *spec.gateway.args]


def _parsers_and_routing(service: Served) -> Iterator[str]:
    gateway, sessions = service.spec.gateway, service.engine("decode").sessions
    if gateway.tool_call_parser is not None:
        yield from ("--tool-call-parser", gateway.tool_call_parser)
    if gateway.reasoning_parser is not None:
        yield from ("--reasoning-parser", gateway.reasoning_parser)
    if gateway.local_prefill_tokens is not None:
        yield from ("--local-prefill-tokens", str(gateway.local_prefill_tokens))
    if gateway.router_exploration is not None:
        yield from ("--router-exploration", f"{gateway.router_exploration:g}")
    if gateway.prefill_fallback is not None:
        yield "--prefill-fallback" if gateway.prefill_fallback else "--no-prefill-fallback"
    if gateway.console is not None:
        yield "--console" if gateway.console else "--no-console"
    if sessions is not None and sessions.ttl_seconds is not None:
        yield from ("--session-ttl", f"{sessions.ttl_seconds:g}")


def _objectives(slo: Slo | None) -> Iterator[str]:
    if slo is None:
        return
    if slo.ttft_seconds is not None:
        yield from ("--slo-ttft-ms", f"{1000 * slo.ttft_seconds:g}")
    if slo.itl_seconds is not None:
        yield from ("--slo-itl-ms", f"{1000 * slo.itl_seconds:g}")
    yield from ("--slo-percentile", f"{slo.percentile:g}", "--slo-admission", slo.admission)


def _limits(limits: GatewayLimits) -> list[str]:
    words: list[str] = []
    if limits.max_waiting_requests is not None:
        words += ["--max-waiting-requests", str(limits.max_waiting_requests)]
    if limits.queue_timeout_seconds is not None:
        words += ["--queue-timeout", f"{limits.queue_timeout_seconds:g}"]
    if limits.max_body_memory_mib is not None:
        words += ["--max-body-memory", str(limits.max_body_memory_mib)]
    if limits.max_body_memory_per_client_mib is not None:
        words += ["--max-body-memory-per-client", str(limits.max_body_memory_per_client_mib)]
    return words


def allowed_hosts(service: Served) -> list[str]:
    """Host names of requests, against DNS rebinding; a gateway adds those that an outsider cannot register."""
    spec = service.spec.gateway
    own = f"{gateway_name(service.name)}.{service.namespace}"
    routed = [] if spec.http_route is None else spec.http_route.hostnames
    if spec.allowed_hosts:
        return [own, *routed, *spec.allowed_hosts]
    any_route = (spec.http_route is not None and not routed) or spec.inference_pool is not None
    if spec.auth_secret is not None or spec.service.type != "ClusterIP" or any_route:
        # A page of an outsider has no API key; and here clients may use names that only their network resolves.
        return ["*"]
    return [own, *routed]
