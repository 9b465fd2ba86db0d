"""Who may give a worker orders: whoever runs it, which without further ado is whoever is on its machine.

The port that probes and Prometheus reach from elsewhere would otherwise let everybody drain the worker or load other
weights into it.
"""

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_services.common.listening import is_loopback
from tandem_services.worker.operator_routes import json_response

REFUSAL = {
    "message": "orders are taken from this worker's own machine alone; start it with --allow-remote-orders to give "
    "them from elsewhere",
    "code": "forbidden",
}


class OrdersFromHere:
    """ASGI middleware: a connection that is not from loopback gets `open_paths`, and 403 for all others."""

    def __init__(self, app: ASGIApp, *, open_paths: Collection[str]) -> None:
        self._app = app
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if scope["path"] in self._open_paths or (client is not None and is_loopback(client[0])):
            await self._app(scope, receive, send)
            return
        await json_response(REFUSAL, 403)(scope, receive, send)
