"""Administrators' routes that load and unload adapters on all workers of a model, in vLLM's form and in SGLang's.

POST /v1/load_lora_adapter     /load_lora_adapter     {lora_name, lora_path, load_inplace?} ─▶ what each worker did
POST /v1/unload_lora_adapter   /unload_lora_adapter   {lora_name}                           ─▶ the same

They need an administrator's key or, without a key file, the order token. `lora_path` is a folder as the workers see it,
in their --lora-dir; the gateway looks at no file. `lora_name` is MODEL:NAME where the gateway serves several models.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_engine.config import AdapterSource
from tandem_services.common.errors import bad_request
from tandem_services.common.tokens import OrderAccess
from tandem_services.gateway.http.authentication import require_order
from tandem_services.gateway.http.body import BodyDecoder, decode_body, read_body
from tandem_services.gateway.http.monitoring_routes import json_response
from tandem_services.gateway.models.adapter_updates import AdapterUpdates
from tandem_services.gateway.models.catalog import ModelCatalog

LOAD, UNLOAD = "load_lora_adapter", "unload_lora_adapter"
ADAPTER_PATHS = tuple(f"{prefix}/{name}" for prefix in ("/v1", "") for name in (LOAD, UNLOAD))
MAX_PATH_CHARACTERS = 4096


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    load_inplace: bool = False
    """Replace the adapter of this name, if there is one."""
    pinned: bool = False
    """SGLang's: on the workers that load it now, it makes way for no other adapter."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: Any = None
    """vLLM's: without effect, there as here."""


_LOAD = BodyDecoder(LoadAdapterRequest, strict=True)
_UNLOAD = BodyDecoder(UnloadAdapterRequest, strict=True)


@dataclass(frozen=True, slots=True)
class AdapterRoutes:
    """Of one port."""

    models: ModelCatalog
    access: OrderAccess
    by_key: bool
    """Authentication has checked for an administrator's key."""

    def routes(self) -> list[Route]:
        return [
            Route(path, self.unload if path.endswith(UNLOAD) else self.load, methods=["POST"]) for path in ADAPTER_PATHS
        ]

    async def load(self, request: Request) -> Response:
        require_order(request, self.access, by_key=self.by_key)
        body = await decode_body(_LOAD.decode, await read_body(request))
        updates, name = self._named(body.lora_name)
        try:
            AdapterSource(name=name, path=body.lora_path)
        except ConfigError as error:
            raise bad_request(str(error), "lora_path" if "\0" in body.lora_path else "lora_name") from error
        if self.models.names_a_model(name):
            raise bad_request(
                f"lora_name: '{quoted(name)}' is a name of a model: give the adapter another one", "lora_name"
            )
        return json_response(await updates.load(name, body.lora_path, replaces=body.load_inplace, pinned=body.pinned))

    async def unload(self, request: Request) -> Response:
        require_order(request, self.access, by_key=self.by_key)
        body = await decode_body(_UNLOAD.decode, await read_body(request))
        updates, name = self._named(body.lora_name)
        return json_response(await updates.unload(name))

    def _named(self, name: str) -> tuple[AdapterUpdates, str]:
        """Where an adapter belongs, and its own name. Raises `ApiError`."""
        service, own = self.models.of_adapter(name, param="lora_name")
        return service.updates, own
