"""Names and labels of all objects of a ModelService. All lookups use these."""

from tandem_operator.api.model_service import GROUP

Labels = dict[str, str]
MANAGED_BY = "tandem-operator"
SERVICE_LABEL = f"{GROUP}/service"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
GATEWAY_LABEL = f"{GROUP}/gateway"
"""Of objects of a ModelGateway: its name. They have no `SERVICE_LABEL`."""

CACHE_LABEL = f"{GROUP}/cache"
"""Of objects of a ModelCache: its name. They have none of the labels above."""

MANAGED = f"app.kubernetes.io/managed-by={MANAGED_BY}"
"""Selects all objects that the operator creates."""


def gateway_name(service: str) -> str:
    """Of the gateway's Deployment and Service: the address that clients use is the service's own name."""
    return f"{service}-gateway"


def gateways_name(service: str) -> str:
    """Of the headless Service that an endpoint picker finds all gateways by."""
    return f"{service}-gateways"


def router_name(service: str) -> str:
    """Of the endpoint picker's Deployment and Service."""
    return f"{service}-router"


def redis_name(service: str) -> str:
    """Of the managed Redis."""
    return f"{service}-redis"


def redis_secret_name(service: str) -> str:
    """Secret with the managed Redis's password, key `password`."""
    return f"{service}-redis"


def curve_secret_name(service: str) -> str:
    """Secret with the key file of the sockets between the parts, key `keys.json`."""
    return f"{service}-curve"


def models_name(gateway: str) -> str:
    """Of the ConfigMap with the models file of a ModelGateway."""
    return f"{gateway}-models"


def fleets_secret_name(gateway: str) -> str:
    """Secret of a ModelGateway with the keys and passwords of the services behind it."""
    return f"{gateway}-fleets"


def pool_name(service: str, role: str) -> str:
    """Of a WorkerPool: what `kubectl scale`, an HPA or KEDA names."""
    return f"{service}-{role}"


def deployment_name(service: str, role: str, revision: str) -> str:
    """Of the Deployment of one role's workers of one revision."""
    return f"{service}-{role}-{revision}"


def cluster_name(namespace: str, service: str) -> str:
    """Name of the fleet within Redis. Its revisions share it, each as a separate peer group: they never pair."""
    return f"{namespace}.{service}"


def labels_of(service: str, component: str, **more: str) -> Labels:
    """Labels of an object; `more` are those of the group, without its prefix."""
    return {
        **_common_labels(service, component),
        SERVICE_LABEL: service,
        **{f"{GROUP}/{key}": value for key, value in more.items()},
    }


def shared_labels_of(gateway: str, component: str) -> Labels:
    """Labels of an object of a ModelGateway."""
    return {**_common_labels(gateway, component), GATEWAY_LABEL: gateway}


def cache_labels_of(cache: str) -> Labels:
    """Labels of an object of a ModelCache."""
    return {**_common_labels(cache, "model-cache"), CACHE_LABEL: cache}


def _common_labels(owner: str, component: str) -> Labels:
    return {
        "app.kubernetes.io/name": "tandem",
        "app.kubernetes.io/instance": owner,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": MANAGED_BY,
    }


def selector_of(labels: Labels) -> Labels:
    """The part of `labels` that never changes in an object's life and selects its pods."""
    kept = (SERVICE_LABEL, GATEWAY_LABEL, CACHE_LABEL, ROLE_LABEL, REVISION_LABEL, "app.kubernetes.io/component")
    return {key: labels[key] for key in kept if key in labels}
