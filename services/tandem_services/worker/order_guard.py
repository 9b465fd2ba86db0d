"""Keeps everything on a worker's port but probes and metrics for who may give orders (`common.order_access`)."""

from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_services.common.order_access import OrderAccess
from tandem_services.worker.operator_routes import json_response

CODES = {401: "unauthorized", 403: "forbidden", 415: "unsupported_media_type"}


class OrderGuard:
    """ASGI middleware: who may not give orders gets `open_paths`, and a refusal for all others."""

    def __init__(self, app: ASGIApp, *, open_paths: Collection[str], access: OrderAccess) -> None:
        self._app = app
        self._open_paths = open_paths
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["path"] in self._open_paths else self._access.refusal(HTTPConnection(scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        response = json_response({"message": refusal.message, "code": CODES[refusal.status]}, refusal.status)
        if refusal.status == 401:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)
