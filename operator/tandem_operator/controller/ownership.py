"""Who owns what of a service: owner references, by which garbage collection takes its objects away in order.

    ModelService ◀── everything
    gateway pods ◀── WorkerPools ◀── workers, Redis, the Secrets and budgets of both, and all network policies

The service is the controller of each object. The other owners outlive it while gateways drain (`planning.deletion`).
"""

from collections.abc import Iterable

from tandem_operator.builders.containers import Manifest
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.kinds import NETWORK_POLICY, POD, WORKER_POOL
from tandem_operator.controller.objects import Seen
from tandem_operator.planning.deletion import HELD_COMPONENTS, gateway_selector
from tandem_operator.telemetry.pods import COMPONENT_LABEL


def owner_reference(service: Seen) -> Manifest:
    """What every object of a service carries: it goes with the service."""
    return {**_reference(service), "controller": True, "blockOwnerDeletion": True}


def owners_of(service: Seen, parts: Parts, known: Iterable[Seen], manifest: Manifest) -> list[Manifest]:
    """Owner references of an object of the service. `known`: objects of the service, newer than those of `parts`."""
    return [owner_reference(service), *map(_reference, _holders(service, parts, known, manifest))]


def _holders(service: Seen, parts: Parts, known: Iterable[Seen], manifest: Manifest) -> list[Seen]:
    if manifest["kind"] == WORKER_POOL.name:
        found = parts.pods_with(gateway_selector(service.ref.name))
    elif manifest["kind"] == NETWORK_POLICY.name or manifest["metadata"]["labels"][COMPONENT_LABEL] in HELD_COMPONENTS:
        found = [one for one in known if one.ref.kind == WORKER_POOL.name and one.owner == service.uid]
    else:
        return []
    return sorted(found, key=lambda one: one.ref.name)


def pods_that_hold(pool: Seen, known: Iterable[Seen]) -> list[Seen]:
    """Gateway pods that own the pool and are there."""
    uids = {one["uid"] for one in pool.body["metadata"].get("ownerReferences", ()) if one["kind"] == POD.name}
    return [one for one in known if one.ref.kind == POD.name and one.uid in uids]


def _reference(owner: Seen) -> Manifest:
    return {
        "apiVersion": owner.ref.api_version,
        "kind": owner.ref.kind,
        "name": owner.ref.name,
        "uid": owner.uid,
    }
