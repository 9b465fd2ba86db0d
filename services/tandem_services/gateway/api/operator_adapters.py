"""Routes of the admin port by which the Kubernetes operator keeps the adapters of a service as its spec has them.

GET  /operator/adapters           registered names: digest, folder, workers that have it in memory; ?model=NAME&cluster=
POST /operator/adapters/load      {lora_name, lora_path, digest?, pinned?, model?, cluster?} ─▶ `CommandReport`
POST /operator/adapters/unload    {lora_name, model?, cluster?}                              ─▶ `CommandReport`
POST /operator/adapters/announce  {lora_names, model?, cluster?}                             ─▶ `CommandReport`

`announce` replaces the names that are to be loaded once there is a worker; requests of them wait for that.

With `workers=table` the GET has the ids of workers once, and of each name a set of their places there: of 256 adapters
on 1,000 workers these are 100 KiB instead of several MiB. Operators of former releases get a list of each name.

`model` selects one of several models; default: the first. With `cluster` it has to be that of this fleet.

They need the order token, which the operator derives from the key file, and no administrator's key: with that token
workers take the same commands. The status is 200 whether a command succeeds or fails, as for canaries.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_engine.config import AdapterSource
from tandem_services.common.errors import ApiError, not_found
from tandem_services.common.tokens import OrderAccess
from tandem_services.gateway.api.adapters import MAX_PATH_CHARACTERS
from tandem_services.gateway.http.authentication import require_order
from tandem_services.gateway.http.body import BodyDecoder, decode_body, read_body
from tandem_services.gateway.http.monitoring_routes import json_response
from tandem_services.gateway.models.adapter_updates import AdapterChange, WorkersFailedError
from tandem_services.gateway.models.adapters import HeldAdapter
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.gateway.models.service import ModelService
from tandem_services.router.registered_adapters import MAX_ANNOUNCED

LIST, LOAD, UNLOAD = "/operator/adapters", "/operator/adapters/load", "/operator/adapters/unload"
ANNOUNCE = "/operator/adapters/announce"
OPERATOR_PATHS = frozenset({LIST, LOAD, UNLOAD, ANNOUNCE})


MAX_FAILED = 8
"""Workers whose failed loads are reported of one adapter, as many as its status has: all of a large fleet may fail."""

MAX_FAILED_IN_ALL = 512
"""The same of all adapters together; each that has failed somewhere has one in any case."""


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that stands for other content is replaced: the spec decides."""

    lora_name: str
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    digest: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$", max_length=32)] = ""
    """Other content is refused; "" for any."""
    pinned: bool = False
    model: str | None = None
    cluster: str | None = None


class UnloadOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    model: str | None = None
    cluster: str | None = None


class AnnounceOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_names: Annotated[list[str], msgspec.Meta(max_length=MAX_ANNOUNCED)]
    model: str | None = None
    cluster: str | None = None


class RegisteredName(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    digest: str
    folder: str
    workers: list[str]
    """Ids; none where `held` has them."""
    held: str = ""
    """Bit i, in hexadecimal: the worker that is the i-th of the table has it in memory."""
    failed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why workers could not load it for a request not long ago, by worker; at most `MAX_FAILED`."""
    failures: int = 0
    """Number of these workers."""


class RegisteredNames(msgspec.Struct, frozen=True, kw_only=True):
    adapters: list[RegisteredName]
    announced: list[str]
    """Names of the last `announce`."""
    table: list[str] | None = None
    """Ids of workers that have some adapter."""


class CommandReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a command."""

    done: bool
    message: str
    failed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Reason by worker; at most `MAX_FAILED`."""
    failures: int = 0
    """Number of workers that have failed."""


_ANNOUNCE = BodyDecoder(AnnounceOrder, strict=True)
_LOAD = BodyDecoder(LoadOrder, strict=True)
_UNLOAD = BodyDecoder(UnloadOrder, strict=True)


@dataclass(frozen=True, slots=True)
class OperatorAdapterRoutes:
    """Of one gateway."""

    models: ModelCatalog
    access: OrderAccess

    def routes(self) -> list[Route]:
        return [
            Route(LIST, self.registered, methods=["GET"]),
            Route(LOAD, self.load, methods=["POST"]),
            Route(UNLOAD, self.unload, methods=["POST"]),
            Route(ANNOUNCE, self.announce, methods=["POST"]),
        ]

    async def registered(self, request: Request) -> Response:
        require_order(request, self.access)
        model = self._service(*map(request.query_params.get, ("model", "cluster"))).model
        held = [each for each in model.adapters.held(model.name) if each.registered and each.requested]
        announced = [*model.announced_adapters]
        most = MAX_FAILED_IN_ALL // max(1, sum(bool(each.failed) for each in held))
        if request.query_params.get("workers") != "table":
            names = [_registered(each, workers=each.workers, most=most) for each in held]
            return json_response(RegisteredNames(adapters=names, announced=announced))
        table = sorted({worker for each in held for worker in each.workers})
        places = {worker: place for place, worker in enumerate(table)}
        names = [_registered(each, places=[places[worker] for worker in each.workers], most=most) for each in held]
        return json_response(RegisteredNames(adapters=names, announced=announced, table=table))

    async def load(self, request: Request) -> Response:
        require_order(request, self.access)
        body = await decode_body(_LOAD.decode, await read_body(request))
        try:
            AdapterSource(name=body.lora_name, path=body.lora_path)
        except ConfigError as error:
            return json_response(CommandReport(done=False, message=str(error)))
        updates = self._service(body.model, body.cluster).updates
        return await _report(
            updates.load(body.lora_name, body.lora_path, replaces=True, pinned=body.pinned, digest=body.digest)
        )

    async def unload(self, request: Request) -> Response:
        require_order(request, self.access)
        body = await decode_body(_UNLOAD.decode, await read_body(request))
        return await _report(self._service(body.model, body.cluster).updates.unload(body.lora_name))

    async def announce(self, request: Request) -> Response:
        require_order(request, self.access)
        body = await decode_body(_ANNOUNCE.decode, await read_body(request))
        try:
            await self._service(body.model, body.cluster).updates.announce(body.lora_names)
        except ApiError as error:
            return json_response(CommandReport(done=False, message=str(error)))
        return json_response(CommandReport(done=True, message=f"{len(body.lora_names)} names are announced."))

    def _service(self, model: str | None, cluster: str | None) -> ModelService:
        """Raises `ApiError`."""
        found = self.models.select(model, cluster)
        if found is None:
            shown = "no model" if model is None else f"no model '{quoted(model)}'"
            raise not_found(f"{shown} is served here yet", "model")
        return found


def _registered(
    adapter: HeldAdapter, *, workers: Sequence[str] = (), places: Sequence[int] = (), most: int
) -> RegisteredName:
    """`most`: failed workers that are named, but one in any case."""
    bits = bytearray(max(places, default=-1) // 8 + 1)
    for place in places:
        bits[place // 8] |= 1 << place % 8
    return RegisteredName(
        name=adapter.name,
        digest=adapter.digest,
        folder=adapter.source,
        workers=[*workers],
        held=bits[::-1].hex(),
        failed=_some(adapter.failed, most=max(1, min(most, MAX_FAILED))),
        failures=len(adapter.failed),
    )


def _some(failed: Mapping[str, str], *, most: int) -> dict[str, str]:
    return dict(sorted(failed.items())[:most])


async def _report(command: Awaitable[AdapterChange]) -> Response:
    try:
        change = await command
    except WorkersFailedError as error:
        failed = _some(error.failed, most=MAX_FAILED)
        return json_response(CommandReport(done=False, message=str(error), failed=failed, failures=len(error.failed)))
    except ApiError as error:
        return json_response(CommandReport(done=False, message=str(error)))
    return json_response(CommandReport(done=True, message=change.message))
