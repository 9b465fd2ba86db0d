"""Administrators' routes on a port of their own (`--admin-port`), away from whoever may reach the API.

/live /ready /health /metrics /version     for probes and Prometheus, without a key
/requests/{id}/explain                     any tenant's request
/drain                                     POST: as SIGTERM
/canary                                    POST: a request of the operator's through a pair of workers (`canary`)
/console                                   the console page, with its scripts and styles, without a key
/console/data/…                            what it shows
/v1/models and those that generate         as on the API's port, for the console's playground

With a key file all but the first line, the page and /canary need a key whose entry says `"admin": true`. /canary, and
/drain without a key file, need the order token (`common.order_access`), from this machine too.
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
from tandem_services.common.errors import ApiError, not_found
from tandem_services.gateway.access.authentication import PROBES, Authentication
from tandem_services.gateway.app import boundary_of, generation_routes
from tandem_services.gateway.boundary import identity_of
from tandem_services.gateway.canary import Canary, CanaryBody
from tandem_services.gateway.composition import Gateway
from tandem_services.gateway.console.routes import Console
from tandem_services.gateway.operations import http_error, json_response, operations_routes
from tandem_services.gateway.request_body import BodyDecoder, decode_body, read_body

CANARY = "/canary"
OPEN_PATHS = PROBES | {"/metrics", "/version", CANARY}
"""Without an API key; canaries have a guard of their own."""

_KINDS = {401: "AuthenticationError", 403: "PermissionDeniedError", 415: "UnsupportedMediaTypeError"}


def create_admin_app(gateway: Gateway, *, drain: Callable[[], None], console: Console | None = None) -> Starlette:
    """The second application of a gateway. `drain` is called on the event loop and returns at once."""

    async def explain(request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        record = gateway.answering.journal.find_anybodys(request_id)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return json_response(record)

    async def begin_drain(request: Request) -> Response:
        # With a key file its administrators' keys have been asked for by now.
        _require_order(request, gateway, by_key=gateway.access is not None)
        drain()
        return json_response({"status": "draining"}, 202)

    canary = Canary(next(iter(gateway.models)), gateway.clock)
    canaries = BodyDecoder(CanaryBody, strict=True)

    async def run_canary(request: Request) -> Response:
        _require_order(request, gateway)
        return json_response(await canary.run(await decode_body(canaries.decode, await read_body(request))))

    async def list_models(request: Request) -> Response:
        return json_response(gateway.models.listing(identity_of(request.scope).caller))

    access = gateway.access
    if access is not None:
        # Who may come in is decided by the key alone: no path of this port is for users.
        access = replace(access, open_paths=OPEN_PATHS, admin_paths=None)
    routes = [
        *operations_routes(gateway.health, gateway.registry, metrics=True),
        Route("/requests/{request_id}/explain", explain, methods=["GET"]),
        Route("/drain", begin_drain, methods=["POST"]),
        Route(CANARY, run_canary, methods=["POST"]),
    ]
    if console is not None:
        access = console.admit(access)
        # What the playground asks, for the administrator who sits at it.
        routes += [*console.routes(), Route("/v1/models", list_models), *generation_routes(gateway)]
    return Starlette(
        routes=routes,
        middleware=[boundary_of(gateway), Middleware(Authentication, access=access)],
        exception_handlers={HTTPException: http_error},
    )


def _require_order(request: Request, gateway: Gateway, *, by_key: bool = False) -> None:
    """Raise `ApiError` unless it is an order. `by_key`: its API key is enough, and it brings no token."""
    access = replace(gateway.order_access, needs_token=not by_key)
    refusal = access.refusal(request)
    if refusal is not None:
        raise ApiError(refusal.status, refusal.message, kind=_KINDS[refusal.status])
