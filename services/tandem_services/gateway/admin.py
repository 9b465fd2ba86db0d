"""Administrators' routes on a port of their own (`--admin-port`), away from whoever may reach the API.

/live /ready /health /metrics /version     for probes and Prometheus, without a key
/requests/{id}/explain                     any tenant's request
/drain                                     POST: as SIGTERM

With a key file the last two need a key whose entry says `"admin": true`.
"""

from collections.abc import Callable
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.logs import quoted
from tandem_services.common.errors import not_found
from tandem_services.gateway.access.authentication import PROBES, Authentication
from tandem_services.gateway.app import Gateway, boundary_of, http_error, json_response, operations_routes

OPEN_PATHS = PROBES | {"/metrics", "/version"}


def create_admin_app(gateway: Gateway, *, drain: Callable[[], None]) -> Starlette:
    """The second application of a gateway. `drain` is called on the event loop and returns at once."""

    async def explain(request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        record = gateway.answering.journal.find_anybodys(request_id)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return json_response(record)

    async def begin_drain(_: Request) -> Response:
        drain()
        return json_response({"status": "draining"}, 202)

    access = gateway.access
    if access is not None:
        # Who may come in is decided by the key alone: no path of this port is for users.
        access = replace(access, open_paths=OPEN_PATHS, admin_paths=None)
    return Starlette(
        routes=[
            *operations_routes(gateway, metrics=True),
            Route("/requests/{request_id}/explain", explain, methods=["GET"]),
            Route("/drain", begin_drain, methods=["POST"]),
        ],
        middleware=[boundary_of(gateway), Middleware(Authentication, access=access)],
        exception_handlers={HTTPException: http_error},
    )
