"""`spec.rollout.paused` within a revision: Deployments are paused, as `kubectl rollout pause` does it. Pure.

    changed template, paused       its pods stay as they are; more are made like them, fewer are taken from them
    paused no longer               the Deployment exchanges its pods for the newest template

A Deployment makes its first pods from a template that it has taken up, and a paused one takes none up: it is paused
once it has pods, and stays so as long as the spec says, whatever becomes of them. A LeaderWorkerSet has no such field:
it exchanges no group below its partition, which is all of them then.
"""

from collections.abc import Iterable

from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.served import Served
from tandem_operator.planning.observed import Observed


def held(manifests: Iterable[Manifest], service: Served, observed: Observed) -> tuple[Manifest, ...]:
    """`manifests`, Deployments among them paused where the spec says so."""
    if not service.spec.rollout.paused:
        return tuple(manifests)
    running = {one.name for one in observed.deployments if one.paused or one.pods}
    return tuple(_paused(one) if one["metadata"]["name"] in running else one for one in manifests)


def _paused(manifest: Manifest) -> Manifest:
    spec = manifest["spec"]
    match manifest["kind"]:
        case "Deployment":
            return {**manifest, "spec": {**spec, "paused": True}}
        case "LeaderWorkerSet":
            strategy = spec["rolloutStrategy"]
            update = {**strategy["rollingUpdateConfiguration"], "partition": spec["replicas"]}
            return {**manifest, "spec": {**spec, "rolloutStrategy": {**strategy, "rollingUpdateConfiguration": update}}}
    return manifest
