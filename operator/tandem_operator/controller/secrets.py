"""Secrets of a service: which of those it needs exist, and those that are made for it.

A Secret is made once and never changed: new keys would part pods that run from pods that start. Secrets are looked up
by name and never watched, so the operator needs no right to list the Secrets of a cluster.
"""

import base64
import json
import secrets
import time
from collections.abc import Callable, Iterable

import zmq

from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import curve_secret_name, labels_of, redis_secret_name
from tandem_operator.builders.redis_access import PASSWORD_KEY
from tandem_operator.builders.served import Served
from tandem_operator.builders.worker import CURVE_KEY
from tandem_operator.controller.cluster import ApiError, Cluster
from tandem_operator.controller.kinds import SECRET, ServiceKey
from tandem_operator.telemetry.orders import OrderFailedError, order_token

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
            "labels": labels_of(key.name, "secret"),
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


class SecretLookup:
    """Existence of Secrets by name, remembered for a while. `clock` is monotonic, in seconds."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._seen: dict[tuple[str, str], float] = {}
        self._tokens: dict[tuple[str, str], tuple[float, str]] = {}

    async def existing(self, namespace: str, names: Iterable[str]) -> frozenset[str]:
        """Those of `names` that exist."""
        return frozenset([name for name in names if await self._exists(namespace, name)])

    async def token(self, service: Served) -> str:
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

    async def create(self, manifest: Manifest) -> bool:
        """Whether it was made; False when somebody was faster, whose Secret then counts."""
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
