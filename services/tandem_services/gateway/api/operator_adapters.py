"""Routes of the admin port by which the Kubernetes operator keeps the adapters of a service as its spec has them.

GET  /operator/adapters           registered names: digest, folder, workers that have it in memory; ?model=NAME&cluster=
POST /operator/adapters/load      {lora_name, lora_path, digest?, pinned?, model?, cluster?} ─▶ `CommandReport`
POST /operator/adapters/unload    {lora_name, model?, cluster?}                              ─▶ `CommandReport`

`model` selects one of several models; default: the first. With `cluster` it has to be that of this fleet.

They need the order token, which the operator derives from the key file, and no administrator's key: with that token
workers take the same commands. The status is 200 whether a command succeeds or fails, as for canaries.
"""

from collections.abc import Awaitable, Mapping
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
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.gateway.models.service import ModelService

LIST, LOAD, UNLOAD = "/operator/adapters", "/operator/adapters/load", "/operator/adapters/unload"
OPERATOR_PATHS = frozenset({LIST, LOAD, UNLOAD})


MAX_FAILED = 8
"""Workers whose failed loads are reported of one adapter, as many as its status has: all of a large fleet may fail."""


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


class RegisteredName(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    digest: str
    folder: str
    workers: list[str]
    failed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why workers could not load it for a request not long ago, by worker; at most `MAX_FAILED`."""


class RegisteredNames(msgspec.Struct, frozen=True, kw_only=True):
    adapters: list[RegisteredName]


class CommandReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a command."""

    done: bool
    message: str
    failed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Reason by worker."""


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
        ]

    async def registered(self, request: Request) -> Response:
        require_order(request, self.access)
        model = self._service(*map(request.query_params.get, ("model", "cluster"))).model
        held = model.adapters.held(model.name)
        names = [
            RegisteredName(
                name=each.name,
                digest=each.digest,
                folder=each.source,
                workers=each.workers,
                failed=dict(sorted(each.failed.items())[:MAX_FAILED]),
            )
            for each in held
            if each.registered and each.requested
        ]
        return json_response(RegisteredNames(adapters=names))

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

    def _service(self, model: str | None, cluster: str | None) -> ModelService:
        """Raises `ApiError`."""
        found = self.models.select(model, cluster)
        if found is None:
            shown = "no model" if model is None else f"no model '{quoted(model)}'"
            raise not_found(f"{shown} is served here yet", "model")
        return found


async def _report(command: Awaitable[AdapterChange]) -> Response:
    try:
        change = await command
    except WorkersFailedError as error:
        return json_response(CommandReport(done=False, message=str(error), failed=error.failed))
    except ApiError as error:
        return json_response(CommandReport(done=False, message=str(error)))
    return json_response(CommandReport(done=True, message=change.message))
