"""An operator's orders over HTTP, on the worker's own port.

    POST /abort          {"rid": "…"} one request by its exact id, {"all": true} every one
    POST /flush_cache    empty the prefix cache; 409 while requests hold KV
    POST /pause          {"mode": "in_place" | "retract" | "abort"}; in_place when the body is empty
    POST /resume
    POST /reload         {"path": "…"} weights of the same architecture; the served folder again without a path
    POST /role           {"role": "prefill" | "decode" | "both"}; 409 while the worker drains
    POST /profile        {"steps": 20, "seconds": 10}; 409 while a trace is recorded
    POST /profile/stop

Answers are 200 with what was done, 400 for an order that makes no sense or a checkpoint that cannot serve,
409 for one that cannot be carried out now, and 504 when the engine does not answer. Bodies are JSON objects;
an unknown field is an error, for a misspelt one would do something else than meant.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.config import Role
from tandem_engine.messages.control import (
    AbortRequests,
    FlushCache,
    OperatorOrder,
    OrderDone,
    PauseGeneration,
    PauseMode,
    ReloadWeights,
    ResumeGeneration,
    StartProfile,
    StopProfile,
)
from tandem_services.worker.control import OrderRefusedError

ANSWER_S = 30.0
"""A step that is being computed has to end before an order takes effect."""
RELOAD_S = 1800.0
"""Loading a large model from slow storage takes a while."""
MAX_BODY_BYTES = 1 << 16
BUSY = "busy"

Body = TypeVar("Body")


class Operate(Protocol):
    """Hands an order to the engine and waits for its answer."""

    async def __call__(self, order: Callable[[int], OperatorOrder], *, timeout_s: float) -> OrderDone:
        """Raises `OrderRefusedError` and `TimeoutError`."""
        ...


class SetRole(Protocol):
    """Changes what the worker is used for."""

    async def __call__(self, role: Role, *, timeout_s: float) -> OrderDone:
        """Raises `OrderRefusedError` and `TimeoutError`."""
        ...


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rid: str | None = None
    all: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: PauseMode = PauseMode.IN_PLACE


class ReloadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str | None = None


class RoleBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: int = 20
    seconds: float = 10.0


class EmptyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BadOrderError(Exception):
    """A body that says nothing an engine could do."""


def operator_routes(operate: Operate, set_role: SetRole) -> list[Route]:
    """The routes of the module docstring."""

    async def role(request: Request) -> Response:
        return await _answer(lambda: _set_role(request, set_role), ANSWER_S)

    def route(
        path: str,
        body_type: type[Body],
        order: Callable[[Body, int], OperatorOrder],
        timeout_s: float = ANSWER_S,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            async def carry_out() -> OrderDone:
                body = await _read(request, body_type)
                # The body is looked at before the engine is asked anything.
                order(body, 0)
                return await operate(lambda nonce: order(body, nonce), timeout_s=timeout_s)

            return await _answer(carry_out, timeout_s)

        return Route(path, endpoint, methods=["POST"])

    return [
        route("/abort", AbortBody, _abort),
        route("/flush_cache", EmptyBody, lambda body, nonce: FlushCache(nonce=nonce)),  # noqa: ARG005
        route("/pause", PauseBody, lambda body, nonce: PauseGeneration(nonce=nonce, mode=body.mode)),
        route("/resume", EmptyBody, lambda body, nonce: ResumeGeneration(nonce=nonce)),  # noqa: ARG005
        route("/reload", ReloadBody, lambda body, nonce: ReloadWeights(nonce=nonce, path=body.path), RELOAD_S),
        Route("/role", role, methods=["POST"]),
        route(
            "/profile",
            ProfileBody,
            lambda body, nonce: StartProfile(nonce=nonce, steps=body.steps, seconds=body.seconds),
        ),
        route("/profile/stop", EmptyBody, lambda body, nonce: StopProfile(nonce=nonce)),  # noqa: ARG005
    ]


async def _set_role(request: Request, set_role: SetRole) -> OrderDone:
    body = await _read(request, RoleBody)
    return await set_role(body.role, timeout_s=ANSWER_S)


async def _answer(carry_out: Callable[[], Awaitable[OrderDone]], timeout_s: float) -> Response:
    """What `carry_out` did, or why it did not, in HTTP."""
    try:
        done = await carry_out()
    except BadOrderError as error:
        return json_response({"code": "bad_order", "message": str(error)}, 400)
    except OrderRefusedError as error:
        status = 409 if error.code == BUSY else 400
        return json_response({"code": error.code, "message": str(error)}, status)
    except TimeoutError:
        message = f"the engine did not answer within {timeout_s:.0f} s"
        return json_response({"code": "timeout", "message": message}, 504)
    return json_response({"message": done.message, **done.figures})


def json_response(body: object, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _abort(body: AbortBody, nonce: int) -> AbortRequests:
    if (body.rid is None) is not body.all:
        raise BadOrderError('abort takes either {"rid": "…"} or {"all": true}')
    return AbortRequests(nonce=nonce, rid=body.rid)


async def _read(request: Request, body_type: type[Body]) -> Body:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise BadOrderError(f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(data) or b"{}", type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadOrderError(f"the body is not what this order takes: {error}") from error
