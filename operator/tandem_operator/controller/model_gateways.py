"""What a ModelService and the ModelGateway that it refers to have to do with each other, from the known objects."""

from tandem_operator.api.model_gateway import ModelGatewayStatus
from tandem_operator.builders.naming import cluster_name, gateway_name
from tandem_operator.builders.served import Served, served_gateway
from tandem_operator.controller.observations import Parts
from tandem_operator.controller.store import (
    MODEL_GATEWAY,
    MODEL_SERVICE,
    WORKER_POOL,
    Seen,
    ServiceKey,
    Store,
    gateway_name_of,
    gateway_spec_of,
    status_as,
)
from tandem_operator.planning.observed import GatewaySeen, Ref
from tandem_operator.settings import OperatorSettings
from tandem_operator.telemetry.pods import PodSeen
from tandem_operator.telemetry.worker_control import ModelAt


def gateway_key(service: Seen) -> ServiceKey | None:
    """Of the ModelGateway to which a ModelService refers."""
    name = gateway_name_of(service)
    return ServiceKey(service.namespace, name, MODEL_GATEWAY.name) if name else None


def gateway_of(store: Store, service: Seen, settings: OperatorSettings) -> Served | None:
    """That ModelGateway; None without one, and where its spec cannot be read, as its status says."""
    key = gateway_key(service)
    found = store.service(key) if key is not None else None
    try:
        return (
            None if found is None else served_gateway(found.ref.name, found.namespace, gateway_spec_of(found), settings)
        )
    except ValueError:
        return None


def model_at(store: Store, service: Seen) -> ModelAt | None:
    """What gateways of a ModelGateway have been given of a ModelService; None before that, and without `gatewayRef`.

    Its own name may be another one's there, if that had it first.
    """
    key = gateway_key(service)
    gateway = store.service(key) if key is not None else None
    if gateway is None:
        return None
    rows = status_as(gateway, ModelGatewayStatus).services
    names = next((one.models for one in rows if one.name == service.ref.name and one.served), [])
    return ModelAt(names[0], cluster_name(service.namespace, service.ref.name)) if names else None


def gateway_pods(store: Store, service: Seen) -> tuple[PodSeen, ...]:
    """Gateways of the ModelGateway to which a ModelService refers, once they have been given it."""
    key = gateway_key(service)
    gateway = store.service(key) if key is not None else None
    if key is None or gateway is None or model_at(store, service) is None:
        return ()
    return tuple(pod for pod in Parts.of(gateway.uid, store.parts(key)).pods_seen() if pod.role == "gateway")


def polled_pods(store: Store, service: Seen) -> tuple[PodSeen, ...]:
    """Workers of a service, and its gateways: its own, or those of its ModelGateway."""
    own = Parts.of(service.uid, store.parts(service.key)).pods_seen()
    if gateway_key(service) is None:
        return own
    return (*(pod for pod in own if pod.role != "gateway"), *gateway_pods(store, service))


def gateway_seen(store: Store, key: ServiceKey, settings: OperatorSettings) -> GatewaySeen | None:
    """What the planner uses of it; None where there is no ModelGateway of that name."""
    service = store.service(key)
    place = gateway_key(service) if service is not None else None
    gateway = store.service(place) if place is not None else None
    if place is None or gateway is None or service is None:
        return None
    status = status_as(gateway, ModelGatewayStatus)
    deployments = Parts.of(gateway.uid, store.parts(place)).deployments()
    wanted = gateway_of(store, service, settings)
    reason, message = _refusal(status, key.name)
    return GatewaySeen(
        endpoint=status.endpoint,
        deployment=next((one for one in deployments if one.name == gateway_name(place.name)), None),
        replicas=1 if wanted is None else wanted.spec.gateway.replicas,
        reason=reason,
        message=message,
    )


def _refusal(status: ModelGatewayStatus, service: str) -> tuple[str, str]:
    one = next((one for one in status.services if one.name == service), None)
    if one is None:
        return "GatewayPending", "the ModelGateway does not list it yet"
    return one.reason, one.message


def namesakes(store: Store, key: ServiceKey) -> frozenset[Ref]:
    """A ModelGateway with the name of an older ModelService, or the other way round, would need the same names.

    A deleted ModelService has its Secrets until its pools are gone; then they are deleted, whatever else uses them.
    """
    this = store.service(key)
    others = (
        store.service(key._replace(kind=kind)) for kind in (MODEL_SERVICE.name, MODEL_GATEWAY.name) if kind != key.kind
    )
    other = next((found for found in others if found is not None), None)
    if this is not None and other is None and key.kind == MODEL_GATEWAY.name:
        left = store.parts(key._replace(kind=MODEL_SERVICE.name))
        return frozenset(seen.ref for seen in left if seen.ref.kind == WORKER_POOL.name)
    if this is None or other is None or _age(this) < _age(other):
        return frozenset()
    return frozenset({other.ref})


def _age(seen: Seen) -> tuple[str, str]:
    """Older objects before younger ones."""
    return seen.body["metadata"].get("creationTimestamp", ""), seen.ref.kind
