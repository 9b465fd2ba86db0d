"""Carries out plans: pools, secrets, manifests, scalings, deletions, statuses, in this order, and nothing that is so
already.

Before the first write the API server checks all of them in a dry run (`rehearsal`): a plan is refused as a whole.

An object is applied when its manifest is another than the one last applied, or when what others may change of it is
not as the API server left it then (`Seen.fingerprint`): edits by hand are put back, and an unchanged service costs no
request. After a start nothing is remembered, and everything is applied once, which changes nothing that is as it
should be.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.roles import RoleName
from tandem_operator.api.worker_pool import WorkerPoolStatus
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import pool_name
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.facts import Parts
from tandem_operator.controller.kinds import POD, SECRET, WORKER_POOL, ServiceKey, kind_of
from tandem_operator.controller.objects import Seen, digest
from tandem_operator.controller.ownership import owners_of
from tandem_operator.controller.rehearsal import Rehearsal
from tandem_operator.controller.resources import generation_of, pool_status_of, status_of
from tandem_operator.controller.secrets import SecretLookup, generated_secret
from tandem_operator.controller.store import Store
from tandem_operator.planning.observed import Ref
from tandem_operator.planning.plan import Plan
from tandem_operator.telemetry.pods import DELETION_COST

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Applied:
    """What was applied, and what it was like then."""

    manifest: bytes
    fingerprint: bytes


class Executor:
    """Writes what plans say. Everything that it changes is owned by the service, by UID."""

    def __init__(self, cluster: Cluster, store: Store, secrets: SecretLookup) -> None:
        self._cluster = cluster
        self._store = store
        self._secrets = secrets
        self._applied: defaultdict[ServiceKey, dict[str, _Applied]] = defaultdict(dict)
        """By service and UID."""

    async def carry_out(self, service: Seen, parts: Parts, plan: Plan) -> bool:
        """Whether anything was written.

        Raises `RefusedError` where the API server refuses a part of the plan beforehand, so that nothing was written,
        and `ApiError` where a write fails: what follows it is left out.
        """
        await self._rehearse(service, parts, plan)
        wrote = False
        # Pools own what comes after them.
        pools = [one for one in plan.apply if one["kind"] == WORKER_POOL.name]
        for manifest in pools:
            wrote |= await self._apply(service, parts, manifest)
        for name in plan.secrets:
            wrote |= await self._secrets.create(self._secret(service, parts, name))
        for manifest in plan.apply:
            if manifest not in pools:
                wrote |= await self._apply(service, parts, manifest)
        for scaling in plan.scale:
            await self._cluster.scale(scaling.ref, service.namespace, scaling.replicas)
            wrote = True
        for ref in plan.delete:
            await self.delete(parts.owned[ref])
            wrote = True
        wrote |= await self._pool_statuses(service, plan.pools)
        return wrote | await self.write_status(service, plan.status)

    async def _rehearse(self, service: Seen, parts: Parts, plan: Plan) -> None:
        """Every write of the plan but statuses, and scalings of objects that the plan itself makes."""
        rehearsal, cluster, namespace = Rehearsal(), self._cluster, service.namespace
        for name in plan.secrets:
            secret = self._secret(service, parts, name)
            await rehearsal.step(SECRET.ref(name), self._secrets.rehearse(secret))
        for manifest in plan.apply:
            owned = self._owned(service, parts, manifest)
            if not self._is_applied(service, parts, owned):
                await rehearsal.step(_ref_of(manifest), cluster.apply(_addressed(parts, owned), dry_run=True))
        for scaling in plan.scale:
            if scaling.ref in parts.owned:
                request = cluster.scale(scaling.ref, namespace, scaling.replicas, dry_run=True)
                await rehearsal.step(scaling.ref, request)
        for ref in plan.delete:
            await rehearsal.step(ref, self._rehearse_delete(parts.owned[ref]))
        rehearsal.end()

    async def _rehearse_delete(self, seen: Seen) -> None:
        try:
            await self._cluster.delete(seen.ref, seen.namespace, seen.uid, dry_run=True)
        except ApiError as error:
            # Another object has its name by now, and stays.
            if not error.conflict:
                raise

    async def foreign(self, service: Seen, parts: Parts, plan: Plan) -> frozenset[Ref]:
        """Names that the plan would write to and that somebody else's objects have. Only what is not known to be ours
        is looked up: nothing of a service that is complete.
        """
        taken = []
        for manifest in plan.apply:
            ref = _ref_of(manifest)
            if ref in parts.owned:
                continue
            body = await self._cluster.get(ref, service.namespace)
            if body is None:
                continue
            seen = Seen.of(body)
            if seen.owner == service.uid:
                self._store.put(seen)
            else:
                taken.append(ref)
        return frozenset(taken)

    async def write_status(self, service: Seen, status: ModelServiceStatus) -> bool:
        """Through the status subresource, if it is another."""
        if status == status_of(service):
            return False
        await self._apply_status(service, msgspec.to_builtins(status))
        return True

    async def delete(self, seen: Seen) -> None:
        """An object that the service owns; one that has taken its name meanwhile stays."""
        try:
            await self._cluster.delete(seen.ref, seen.namespace, seen.uid)
        except ApiError as error:
            if not error.conflict:
                raise
            logger.info("keeping %s %s: it was replaced by another object", seen.ref.kind, seen.ref.name)
        self._applied[seen.key].pop(seen.uid, None)

    async def scale(self, ref: Ref, namespace: str, replicas: int) -> None:
        """Through the scale subresource."""
        await self._cluster.scale(ref, namespace, replicas)

    async def annotate_costs(self, namespace: str, costs: Mapping[str, int]) -> None:
        """Which pods go first when their number shrinks, by name: the cheapest."""
        for name, cost in costs.items():
            body = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
            try:
                await self._cluster.merge(POD.ref(name), namespace, body)
            except ApiError as error:
                # Gone meanwhile: it costs nothing any more.
                if not error.absent:
                    raise

    async def set_finalizers(self, service: Seen, finalizers: list[str]) -> None:
        """Raises `ApiError` (409) when somebody has written meanwhile: the next look decides anew."""
        body = {"metadata": {"resourceVersion": str(service.version), "finalizers": finalizers}}
        self._store.put(Seen.of(await self._cluster.merge(service.ref, service.namespace, body)))

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._applied.pop(key, None)

    async def _apply(self, service: Seen, parts: Parts, manifest: Manifest) -> bool:
        owned = self._owned(service, parts, manifest)
        if self._is_applied(service, parts, owned):
            return False
        result = Seen.of(await self._cluster.apply(_addressed(parts, owned)))
        self._applied[service.key][result.uid] = _Applied(digest(owned), result.fingerprint)
        self._store.put(result)
        return True

    def _owned(self, service: Seen, parts: Parts, manifest: Manifest) -> Manifest:
        """With its owners."""
        owners = owners_of(service, parts, self._store.parts(service.key), manifest)
        return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": owners}}

    def _secret(self, service: Seen, parts: Parts, name: str) -> Manifest:
        return self._owned(service, parts, generated_secret(service.key, name))

    def _is_applied(self, service: Seen, parts: Parts, manifest: Manifest) -> bool:
        seen = parts.owned.get(_ref_of(manifest))
        if seen is None:
            return False
        return self._applied[service.key].get(seen.uid) == _Applied(digest(manifest), seen.fingerprint)

    async def _pool_statuses(self, service: Seen, pools: Mapping[RoleName, WorkerPoolStatus]) -> bool:
        wrote = False
        known = {seen.ref: seen for seen in self._store.parts(service.key) if seen.owner == service.uid}
        for role, status in pools.items():
            pool = known.get(WORKER_POOL.ref(pool_name(service.ref.name, role)))
            if pool is None:
                continue
            wanted = msgspec.structs.replace(status, observed_generation=generation_of(pool))
            if wanted != pool_status_of(pool):
                await self._apply_status(pool, msgspec.to_builtins(wanted))
                wrote = True
        return wrote

    async def _apply_status(self, seen: Seen, status: Manifest) -> None:
        metadata = {"name": seen.ref.name, "namespace": seen.namespace, "uid": seen.uid}
        body = {"apiVersion": seen.ref.api_version, "kind": seen.ref.kind, "metadata": metadata, "status": status}
        self._store.put(Seen.of(await self._cluster.apply(body, subresource="status")))


def _addressed(parts: Parts, manifest: Manifest) -> Manifest:
    """For the object that was seen alone: another of this name, made a moment ago by another client, stays."""
    seen = parts.owned.get(_ref_of(manifest))
    return manifest if seen is None else {**manifest, "metadata": {**manifest["metadata"], "uid": seen.uid}}


def _ref_of(manifest: Manifest) -> Ref:
    return kind_of(manifest["apiVersion"], manifest["kind"]).ref(manifest["metadata"]["name"])
