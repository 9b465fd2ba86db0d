"""Who may give a worker orders: whoever runs it, by being on its machine or by the token of its deployment.

The port that probes and Prometheus reach from elsewhere would otherwise let everybody drain the worker or load other
weights into it.
"""

from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem_services.common.order_token import may_order
from tandem_services.worker.operator_routes import json_response

REFUSAL = {
    "message": "orders are taken from this worker's own machine, or with the token of its key file; start it with "
    "--allow-remote-orders to give them from elsewhere without one",
    "code": "forbidden",
}


class OrderAccess:
    """ASGI middleware: whoever may not give orders gets `open_paths`, and 403 for all others."""

    def __init__(self, app: ASGIApp, *, open_paths: Collection[str], token: str | None) -> None:
        """`token`: of the deployment; None where there are no keys."""
        self._app = app
        self._open_paths = open_paths
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._open_paths or may_order(HTTPConnection(scope), self._token):
            await self._app(scope, receive, send)
            return
        await json_response(REFUSAL, 403)(scope, receive, send)
