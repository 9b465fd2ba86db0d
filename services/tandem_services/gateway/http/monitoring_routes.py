"""Routes for probes and Prometheus, on either port, and the JSON response that all routes share."""

from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.base.logs import quoted
from tandem_engine.base.release import product_version
from tandem_services.common.errors import ApiError
from tandem_services.common.health import Health
from tandem_services.common.metrics import CONTENT_TYPE, render
from tandem_services.gateway.http.errors import error_body
from tandem_services.gateway.http.middleware import identity_of
from tandem_services.gateway.http.sse import encode_json


class Live(msgspec.Struct, kw_only=True):
    status: Literal["ok"] = "ok"


class Load(msgspec.Struct, kw_only=True):
    """vLLM's name for the requests that are being answered, those that wait for a worker among them."""

    server_load: int


class Version(msgspec.Struct, kw_only=True):
    version: str


VERSION = product_version()


METRICS_PATH = "/metrics"
READ = ["GET", "HEAD"]


def operations_routes(health: Health, registry: CollectorRegistry, *, metrics: bool) -> list[Route]:
    """What probes and Prometheus ask; `metrics`: with /metrics."""

    async def live(_: Request) -> Response:
        return json_response(Live())

    async def ready(_: Request) -> Response:
        report = health.report()
        return json_response(report, report.http_status)

    async def get_version(_: Request) -> Response:
        return json_response(Version(version=VERSION))

    async def get_metrics(_: Request) -> Response:
        return Response(await render(registry), headers={"content-type": CONTENT_TYPE})

    answers = {"/live": live, "/ready": ready, "/health": ready, "/version": get_version}
    if metrics:
        answers[METRICS_PATH] = get_metrics
    # SageMaker sends GET, and vLLM answers both.
    ping = Route("/ping", ready, methods=[*READ, "POST"])
    return [Route(path, answer, methods=READ) for path, answer in answers.items()] + [ping]


def json_response(document: object, status: int = 200) -> Response:
    return Response(encode_json(document), status, media_type="application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """Routing's own refusals (404, 405) in the shape that clients of the path expect."""
    assert isinstance(error, HTTPException), type(error)
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    refusal = ApiError(error.status_code, _refusal(request, error), kind=kind)
    body = error_body(refusal, path=request.scope["path"], request_id=identity_of(request.scope).public_id)
    return Response(body, error.status_code, error.headers, "application/json")


def _refusal(request: Request, error: HTTPException) -> str:
    """What is wrong with method or path, and where it is one of the usual slips, how it should be."""
    path = request.scope["path"]
    asked = f"{request.method} {quoted(path)}"
    if error.status_code == 405 and error.headers:
        return f"{asked} is not served: use {error.headers.get('Allow', 'another method')}"
    if error.status_code != 404 or error.detail != "Not Found":
        return error.detail
    # Clients add /v1 to a base URL that has it already, or do not and it has not.
    served = {getattr(route, "path", None) for route in request.app.routes}
    meant = [other for other in (f"/v1{path}", path.removeprefix("/v1")) if other != path and other in served]
    return f"{asked} is not served{f': did you mean {meant[0]}?' if meant else ''}"
