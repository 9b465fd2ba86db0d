"""Opening and closing sessions: `/v1/sessions`, and SGLang's two routes for its clients.

POST /v1/sessions          {model?, session_id?, cache_salt?} ─▶ {id, object, expires_in}
DELETE /v1/sessions/{id}   ?model=&cache_salt=                ─▶ {id, object, deleted}
POST /open_session         {model?, session_id?, …}           ─▶ "id"
POST /close_session        {model?, session_id}               ─▶ nothing

A session belongs to a model, which has to be named where there are several.
"""

import secrets
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.base.errors import WireError
from tandem_engine.messages.requests import CloseSession
from tandem_services.gateway.dispatch.sessions import session_name
from tandem_services.gateway.http.body import BodyDecoder, decode_body, read_body
from tandem_services.gateway.http.known_fields import Refused
from tandem_services.gateway.http.middleware import identity_of
from tandem_services.gateway.http.sse import encode_json
from tandem_services.gateway.limits import check_cache_salt
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.router.shared_state import SessionName

PATH = "/v1/sessions"


class OpenRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    capacity_of_str_len: Any = None
    rid: Any = None
    streaming: Any = None
    timeout: Refused = None


class CloseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: str
    model: str | None = None
    cache_salt: str | None = None
    rid: Any = None


class OpenedSession(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session"] = "session"
    expires_in: float
    """Seconds without use."""


class ClosedSession(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


_OPEN = BodyDecoder(OpenRequest, strict=False)
_CLOSE = BodyDecoder(CloseRequest, strict=False)


@dataclass(slots=True)
class SessionRoutes:
    """The four routes. Errors are `ApiError`s, as those of every other route."""

    models: ModelCatalog

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self.open, methods=["POST"]),
            Route(PATH + "/{session_id:path}", self.delete, methods=["DELETE"]),
            Route("/open_session", self.open_as_sglang, methods=["POST"]),
            Route("/close_session", self.close_as_sglang, methods=["POST"]),
        ]

    async def open(self, request: Request) -> Response:
        name, expires_in = await self._open(request)
        return _json(OpenedSession(id=name.id, expires_in=expires_in))

    async def open_as_sglang(self, request: Request) -> Response:
        name, _ = await self._open(request)
        return _json(name.id)

    async def delete(self, request: Request) -> Response:
        session_id: str = request.path_params["session_id"]
        params = request.query_params
        await self._close(request, session_id, params.get("model"), params.get("cache_salt"))
        return _json(ClosedSession(id=session_id))

    async def close_as_sglang(self, request: Request) -> Response:
        body = await decode_body(_CLOSE.decode, await read_body(request))
        await self._close(request, body.session_id, body.model, body.cache_salt)
        return Response()

    async def _open(self, request: Request) -> tuple[SessionName, float]:
        """The session, and for how long it is kept unused, in seconds."""
        body = await decode_body(_OPEN.decode, await read_body(request))
        served = self.models.of_request(request.scope, body.model).service
        check_cache_salt(body.cache_salt)
        session_id = secrets.token_hex(16) if body.session_id is None else body.session_id
        name = session_name(session_id, _salt(request, body.cache_salt), param="session_id")
        await served.session_manager.open(name)
        return name, served.session_manager.ttl_s

    async def _close(self, request: Request, session_id: str, model: str | None, cache_salt: str | None) -> None:
        served = self.models.of_request(request.scope, model).service
        check_cache_salt(cache_salt)
        name = session_name(session_id, _salt(request, cache_salt), param="session_id")
        incarnation = await served.session_manager.close(name)
        keeper = next((w for w in served.chooser.workers() if w.incarnation == incarnation), None)
        if keeper is None:
            return
        try:
            served.engines.connect(keeper).close_session(CloseSession(session=name.id, cache_salt=name.cache_salt))
        except WireError:
            served.chooser.mark_dead(keeper.incarnation)


def _salt(request: Request, cache_salt: str | None) -> str:
    """Sessions of two tenants with the same id are two sessions."""
    return identity_of(request.scope).caller.cache_salt(cache_salt or "")


def _json(document: object) -> Response:
    return Response(encode_json(document), media_type="application/json")
