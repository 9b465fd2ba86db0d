"""Applies plans: pools, secrets, manifests, scalings, deletions, statuses, in this order; skips correct objects.

    requests of the plan ─▶ each with dryRun=All ─▶ one rejected  ─▶ `RefusedError`, and nothing has changed
                                                 ─▶ none rejected ─▶ the plan is applied

`Rehearsal` is the dry run. If the API server rejects one object of a plan, no other object changes. Effects that a dry
run does not count, such as the quota that two new objects use together, appear only when the plan is applied.

`Applier` applies an object when its manifest differs from the last applied one, or when fields that others may change
differ from what the API server returned then (`Seen.fingerprint`). Manual edits are therefore reverted, and an
unchanged service costs no request. After a start everything is applied once, which changes nothing that is correct.

`owners_of` sets the owner references, by which garbage collection deletes objects in order:

    ModelService ◀── everything
    gateway pods ◀── WorkerPools ◀── workers, Redis, the Secrets and budgets of both, and all network policies

The service is the controller of each object. The other owners outlive it while gateways drain (`planning.deletion`).

`SecretLookup` finds which required Secrets exist; missing generated ones are created. Such a Secret is created once and
never changed, because new keys would separate running pods from new ones. Only the copies of keys and passwords that a
ModelGateway mounts are applied like other objects. Secrets are read by name and never watched, so the operator needs no
permission to list the Secrets of a cluster.
"""

import base64
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from tandem_operator.api.model_cache import ModelCacheStatus
from tandem_operator.api.model_gateway import ModelGatewayStatus
from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.api.types import RoleName
from tandem_operator.api.worker_pool import WorkerPoolStatus
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import (
    curve_secret_name,
    labels_of,
    pool_name,
    redis_secret_name,
    shared_labels_of,
)
from tandem_operator.builders.redis import PASSWORD_KEY
from tandem_operator.builders.worker import CURVE_KEY
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.observations import Parts
from tandem_operator.controller.store import (
    MODEL_GATEWAY,
    NETWORK_POLICY,
    POD,
    SECRET,
    WORKER_POOL,
    Seen,
    ServiceKey,
    Store,
    digest,
    generation_of,
    kind_of,
    status_as,
)
from tandem_operator.planning.deletion import HELD_COMPONENTS, gateway_selector
from tandem_operator.planning.model_cache import CachePlan
from tandem_operator.planning.model_gateway import GatewayPlan
from tandem_operator.planning.observed import Ref
from tandem_operator.planning.plan import Changes, Plan, Scaling
from tandem_operator.telemetry.pods import COMPONENT_LABEL, DELETION_COST
from tandem_operator.telemetry.worker_control import OrderFailedError, order_token


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


MAX_REFUSALS = 4
"""Refused objects that a message names."""

_CANNOT_REHEARSE = "does not support dry run"
"""What the API server answers where an admission webhook has side effects: such a request is not checked beforehand."""


class RefusedError(ApiError):
    """What the API server answered of each refused object. `status` is that of the first."""

    def __init__(self, refusals: list[tuple[Ref, ApiError]]) -> None:
        first = refusals[0][1]
        shown = "; ".join(f"{ref.kind} {ref.name!r}: {error.message or error}" for ref, error in refusals)
        super().__init__(first.status, first.reason, shown)


class Rehearsal:
    """Await `step` for each request of a plan, then call `end`."""

    def __init__(self) -> None:
        self._refusals: list[tuple[Ref, ApiError]] = []

    async def step(self, ref: Ref, request: Awaitable[object]) -> None:
        """Raises `ApiError` where the error is not about the request itself: another attempt may succeed."""
        try:
            await request
        except ApiError as error:
            if not error.refused:
                raise
            if _CANNOT_REHEARSE not in error.message:
                self._refusals.append((ref, error))
        if len(self._refusals) >= MAX_REFUSALS:
            self.end()

    def end(self) -> None:
        """Raises `RefusedError` if a request was refused."""
        if self._refusals:
            raise RefusedError(self._refusals)


RECHECK_S = 240.0
"""A Secret that was there is looked up again after this, which is before the next full list has everything looked at;
one that was not, each time."""

PASSWORD_BYTES = 24


def generated_secret(key: ServiceKey, name: str) -> Manifest:
    """The manifest of a Secret that is made for a service, with fresh contents and without owner references."""
    contents = {
        curve_secret_name(key.name): (CURVE_KEY, _curve_keys),
        redis_secret_name(key.name): (PASSWORD_KEY, _password),
    }
    entry, make = contents[name]
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.name,
        "metadata": {
            "name": name,
            "namespace": key.namespace,
            "labels": (shared_labels_of if key.kind == MODEL_GATEWAY.name else labels_of)(key.name, "secret"),
        },
        "type": "Opaque",
        "data": {entry: base64.b64encode(make()).decode("ascii")},
    }


def _curve_keys() -> bytes:
    """A key file as workers and gateways read it: Z85, one pair for the whole deployment."""
    public, secret = zmq.curve_keypair()
    return json.dumps({"public": public.decode("ascii"), "secret": secret.decode("ascii")}).encode("ascii")


def _password() -> bytes:
    return secrets.token_urlsafe(PASSWORD_BYTES).encode("ascii")


class KeyHolder(Protocol):
    """A ModelService, or a ModelGateway."""

    @property
    def namespace(self) -> str: ...

    @property
    def curve_secret(self) -> str:
        """Secret with its key file."""
        ...


class SecretLookup:
    """Existence of Secrets by name, remembered for a while. `clock` is monotonic, in seconds."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._seen: dict[tuple[str, str], float] = {}
        self._tokens: dict[tuple[str, str], tuple[float, str]] = {}
        self._contents: dict[tuple[str, str], tuple[float, Mapping[str, str]]] = {}

    async def existing(self, namespace: str, names: Iterable[str]) -> frozenset[str]:
        """Those of `names` that exist."""
        return frozenset([name for name in names if await self._exists(namespace, name)])

    async def contents(self, namespace: str, name: str) -> Mapping[str, str] | None:
        """What a Secret has, in base64, as of at most `RECHECK_S` ago; None if it does not exist."""
        place = (namespace, name)
        known = self._contents.get(place)
        if known is not None and self._clock() - known[0] < RECHECK_S:
            return known[1]
        secret = await self._cluster.get(SECRET.ref(name), namespace)
        if secret is None:
            self._contents.pop(place, None)
            return None
        self._contents[place] = (self._clock(), secret.get("data", {}))
        return self._contents[place][1]

    async def read(self, namespace: str, name: str) -> Manifest | None:
        """A Secret as it is now."""
        return await self._cluster.get(SECRET.ref(name), namespace)

    async def token(self, service: KeyHolder) -> str:
        """For orders to the service's pods. Raises `OrderFailedError` while its key file is not there or is none."""
        place = (service.namespace, service.curve_secret)
        known = self._tokens.get(place)
        if known is not None and self._clock() - known[0] < RECHECK_S:
            return known[1]
        secret = await self._cluster.get(SECRET.ref(service.curve_secret), service.namespace)
        if secret is None:
            raise OrderFailedError(f"Secret {service.curve_secret!r} does not exist yet")
        try:
            token = order_token(base64.b64decode(secret.get("data", {}).get(CURVE_KEY, "")))
        except ValueError as error:
            raise OrderFailedError(f"Secret {service.curve_secret!r}: {error}") from error
        self._tokens[place] = (self._clock(), token)
        return token

    def forget(self, namespace: str) -> None:
        """A service of that namespace went, and its Secrets with it."""
        self._seen = {place: at for place, at in self._seen.items() if place[0] != namespace}
        self._tokens = {place: known for place, known in self._tokens.items() if place[0] != namespace}
        self._contents = {place: known for place, known in self._contents.items() if place[0] != namespace}

    async def create(self, manifest: Manifest) -> bool:
        """Whether it was created; False when another writer was faster, whose Secret then counts."""
        place = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        made = True
        try:
            await self._cluster.create(manifest)
        except ApiError as error:
            if not error.conflict:
                raise
            made = False
        self._seen[place] = self._clock()
        return made

    async def rehearse(self, manifest: Manifest) -> None:
        """`create` as a dry run. Raises `ApiError` where the API server refuses."""
        try:
            await self._cluster.create(manifest, dry_run=True)
        except ApiError as error:
            if not error.conflict:
                raise

    async def _exists(self, namespace: str, name: str) -> bool:
        place = (namespace, name)
        at = self._seen.get(place)
        if at is not None and self._clock() - at < RECHECK_S:
            return True
        if await self._cluster.get(SECRET.ref(name), namespace) is None:
            self._seen.pop(place, None)
            return False
        self._seen[place] = self._clock()
        return True


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Applied:
    """What was applied, and what it was like then."""

    manifest: bytes
    fingerprint: bytes


class Applier:
    """Writes what plans say. Everything that it changes is owned by the service, by UID."""

    def __init__(self, cluster: Cluster, store: Store, secrets: SecretLookup) -> None:
        self._cluster = cluster
        self._store = store
        self._secrets = secrets
        self._applied: defaultdict[ServiceKey, dict[str, _Applied]] = defaultdict(dict)
        """By service and UID."""

    async def apply_plan(self, service: Seen, parts: Parts, plan: Plan | GatewayPlan | CachePlan) -> bool:
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
            await self._scale(scaling, service, parts)
            wrote = True
        for ref in plan.delete:
            await self.delete(parts.owned[ref])
            wrote = True
        wrote |= await self._pool_statuses(service, plan.pools)
        return wrote | await self.write_status(service, plan.status)

    async def _rehearse(self, service: Seen, parts: Parts, plan: Changes) -> None:
        """Every write of the plan but statuses, and scalings of objects that the plan itself makes."""
        rehearsal, cluster = Rehearsal(), self._cluster
        for name in plan.secrets:
            secret = self._secret(service, parts, name)
            await rehearsal.step(SECRET.ref(name), self._secrets.rehearse(secret))
        for manifest in plan.apply:
            owned = self._owned(service, parts, manifest)
            if not self._is_applied(service, parts, owned):
                await rehearsal.step(_ref_of(manifest), cluster.apply(_addressed(parts, owned), dry_run=True))
        for scaling in plan.scale:
            if scaling.ref in parts.owned:
                await rehearsal.step(scaling.ref, self._scale(scaling, service, parts, dry_run=True))
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

    async def foreign(self, service: Seen, parts: Parts, plan: Changes) -> frozenset[Ref]:
        """Names that the plan would write to and that objects of another owner have. Only what is not known to be ours
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

    async def write_status(
        self, service: Seen, status: ModelServiceStatus | ModelGatewayStatus | ModelCacheStatus
    ) -> bool:
        """Through the status subresource, if it is another."""
        if status == status_as(service, type(status)):
            return False
        await self.apply_status(service, msgspec.to_builtins(status))
        return True

    async def delete(self, seen: Seen) -> None:
        """Delete an object that the service owns; another one that has taken its name in the meantime stays."""
        try:
            if not await self._cluster.delete(seen.ref, seen.namespace, seen.uid):
                # A watch missed its end. Kept in the store, it would be deleted again at every look.
                self._store.drop(seen)
        except ApiError as error:
            if not error.conflict:
                raise
            logger.info("keeping %s %s: it was replaced by another object", seen.ref.kind, seen.ref.name)
        self._applied[seen.key].pop(seen.uid, None)

    async def _scale(self, scaling: Scaling, service: Seen, parts: Parts, *, dry_run: bool = False) -> None:
        """Raises `ApiError`. An object that the API server does not have leaves the store first: a watch missed its
        end, and the next look must not try to scale it again.
        """
        try:
            await self._cluster.scale(scaling.ref, service.namespace, scaling.replicas, dry_run=dry_run)
        except ApiError as error:
            seen = parts.owned.get(scaling.ref)
            if error.absent and seen is not None and await self._cluster.get(scaling.ref, service.namespace) is None:
                self._store.drop(seen)
            raise

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
                # Deleted in the meantime: it costs nothing any more.
                if not error.absent:
                    raise

    async def set_finalizers(self, service: Seen, finalizers: list[str]) -> None:
        """Raises `ApiError` (409) after another write in the meantime: the next reconcile decides again."""
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
            if wanted != status_as(pool, WorkerPoolStatus):
                await self.apply_status(pool, msgspec.to_builtins(wanted))
                wrote = True
        return wrote

    async def apply_status(self, seen: Seen, status: Manifest) -> None:
        """Through the status subresource, of any object."""
        metadata = {"name": seen.ref.name, "namespace": seen.namespace, "uid": seen.uid}
        body = {"apiVersion": seen.ref.api_version, "kind": seen.ref.kind, "metadata": metadata, "status": status}
        self._store.put(Seen.of(await self._cluster.apply(body, subresource="status")))


def _addressed(parts: Parts, manifest: Manifest) -> Manifest:
    """For the object that was seen alone: another of this name, made a moment ago by another client, stays."""
    seen = parts.owned.get(_ref_of(manifest))
    return manifest if seen is None else {**manifest, "metadata": {**manifest["metadata"], "uid": seen.uid}}


def _ref_of(manifest: Manifest) -> Ref:
    return kind_of(manifest["apiVersion"], manifest["kind"]).ref(manifest["metadata"]["name"])
