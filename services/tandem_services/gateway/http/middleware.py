"""The outermost layer of every HTTP request: identity, deadline, disconnects, errors and shutdown.

`RequestBoundary` wraps the application:

    1. bounds      reject too many or too large headers, too long URLs and invalid Hosts before routing
    2. identity    an id of our own, unique in the fleet; a valid X-Request-Id of the client is echoed, else ours is
    3. errors      an exception of a handler becomes an error response, or a log line after a disconnect
    4. counting    one metric per response; errors on API paths are recorded for the console
    5. tracing     the trace of the client's headers, or a new one, if tracing is enabled
    6. draining    responses close their connections, so that clients connect to another gateway

`deadline_of` computes the deadline: the shortest of the gateway's limit, the header `X-Request-Timeout` and the body's
`timeout`, in seconds. It goes with the request to the queue, the workers and every retry.

`interruption` cancels the work when its client disconnects, which Starlette does not, at the deadline, and at the end
of a drain. A stream gets the error as its last event; before the response has started, it has a status of its own.
"""

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem_engine.base.clock import Clock
from tandem_engine.base.logs import about_request, quoted
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.errors import ApiError, bad_request
from tandem_services.common.health import Health
from tandem_services.common.metrics import bounded_label
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.http.errors import PATH as ANTHROPIC_PATH
from tandem_services.gateway.http.errors import UNEXPECTED, as_api_error, error_body, send_error, speaks_anthropic
from tandem_services.gateway.http.interruption import (
    AtOnce,
    Bodies,
    ClientGoneError,
    client_of,
    forget_client,
    shutting_down,
)
from tandem_services.gateway.limits import (
    MAX_HEADER_BYTES,
    MAX_HEADER_FIELDS,
    MAX_REQUEST_ID_CHARACTERS,
    MAX_URL_BYTES,
    BodyBudget,
    BodyCharge,
    url_too_long,
)
from tandem_services.gateway.observe.tracing import UNTRACED, RequestTrace, Traces, pass_on
from tandem_services.router.tickets import NO_TICKET, TICKET_HEADER, RouteTicket

logger = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
_ids = random.Random()
"""Begins with entropy of the system: a system call for each request lets another thread take the GIL."""

TIMEOUT_HEADER = "X-Request-Timeout"
_TIMEOUT_NAME = TIMEOUT_HEADER.lower().encode("ascii")
_TICKET_NAME = TICKET_HEADER.lower().encode("ascii")
_SANE_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")

_SANE_HOST = re.compile(rb"[\w.~%:\[\]-]{0,261}")
"""A name of at most 255 characters and a port."""

_SCOPE_KEY = "tandem_request"
_ERRORS = frozenset({*range(400, 600)} - {CLIENT_CLOSED_REQUEST})

PROBE_PATHS = frozenset({"/live", "/ready", "/health"})
"""They say nothing of the deployment, and load balancers ask for them by any name."""


def _not_at_once(status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
    del status, headers, body
    return False


@dataclass(kw_only=True, slots=True, eq=False)
class RequestIdentity:
    """The client, and the time of arrival (the gateway's clock). One per request: what is learned later is added."""

    request_id: str
    client_request_id: str | None
    arrived: float
    timeout: str | None = None
    """The client's `TIMEOUT_HEADER`, as it was sent."""
    ticket: RouteTicket = NO_TICKET
    """Of a stand-alone router that has chosen the workers."""
    body: BodyCharge
    """The bytes of its body that are held."""
    caller: Caller = field(default_factory=Caller)
    model: str = ""
    """Name of the model service that answers; "" until one is known to."""
    trace: RequestTrace = UNTRACED
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    """By lower-case names, of each the first."""
    on_end: list[Callable[[], None]] = field(default_factory=list)
    """Called after the last byte, or when there will be none."""
    answer_at_once: AtOnce = _not_at_once

    @property
    def public_id(self) -> str:
        """The request id for the client: its own, if it sent one."""
        return self.client_request_id or self.request_id

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


def identity_of(scope: Scope) -> RequestIdentity:
    """The identity that `RequestBoundary` gave to this request."""
    identity: RequestIdentity = scope[_SCOPE_KEY]
    return identity


def identify_caller(scope: Scope, caller: Caller) -> None:
    """From now on the request is known to be `caller`'s."""
    identity_of(scope).caller = caller


def identify_request(scope: Scope, name: str | None) -> None:
    """From now on the request is known by the `name` in its body, if that is sane and its head gave it none."""
    _name(identity_of(scope), name)


def _name(identity: RequestIdentity, name: str | None) -> None:
    if identity.client_request_id is None and name is not None and _SANE_ID.fullmatch(name):
        identity.client_request_id = name


def identify_model(scope: Scope, model: str, *, on_end: Callable[[], None]) -> None:
    """From now on the request is known to be answered by the model service of this name. `on_end`: when it has been."""
    identity = identity_of(scope)
    identity.model = model
    identity.on_end.append(on_end)


class AnswerMetrics(Protocol):
    """What is counted here; `model` is "" where none is known to answer."""

    def answered(self, endpoint: str, status: int, *, model: str) -> None: ...

    def disconnected(self, *, model: str) -> None: ...


Refused: TypeAlias = Callable[[RequestIdentity, str, int, ApiError | None], None]
"""A POST to the path was answered with this status, and the error where one was raised."""


class RequestBoundary:
    """ASGI middleware. `endpoints` are the paths that may become metric labels.

    `sends_body_after_head`: `app` sends the beginning of the body right after the head, so that both are one write.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Clock,
        metrics: AnswerMetrics,
        health: Health,
        endpoints: Collection[str],
        traces: Traces = pass_on,
        hosts: AllowedHosts,
        bodies: BodyBudget | None = None,
        refused: Refused | None = None,
        sends_body_after_head: bool = False,
    ) -> None:
        self._app = app
        self._clock = clock
        self._metrics = metrics
        self._health = health
        self._endpoints = endpoints
        self._traces = traces
        self._hosts = hosts
        self._bodies = bodies or BodyBudget()
        self._refused = refused
        self._joins = sends_body_after_head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The last boundary: what fails in the one below is answered with bytes that were made before."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        def watched(message: Message) -> Awaitable[None]:
            nonlocal started
            started = True
            return send(message)

        try:
            await self._answer(scope, receive, watched)
        except Exception:
            logger.exception("request failed outside of its boundary")
            body = client_of(scope).body
            if not started and (body is None or not body.started):
                for message in _LAST_ANSWERS[speaks_anthropic(scope["path"])]:
                    await send(message)
        finally:
            # The connection's objects refer to the scope, too: nothing is left for the garbage collector.
            forget_client(scope)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = self._identify(scope, self._clock.now())
        scope[_SCOPE_KEY] = identity
        answer = _Answer(send, scope, self._health, client_of(scope).body if self._joins else None)
        identity.answer_at_once = answer.at_once
        try:
            _check_head(scope, self._hosts)
            await self._app(scope, receive, answer.send)
        except ClientGoneError:
            answer.status = CLIENT_CLOSED_REQUEST
            self._metrics.disconnected(model=identity_of(scope).model)
        except asyncio.CancelledError:
            # The server ends and waits no longer. What has not begun is refused; what has cannot be completed.
            if not self._health.draining:
                raise
            answer.status = 503
            if not answer.started:
                await self._refuse(answer, scope, shutting_down())
        except Exception as error:  # noqa: BLE001  # the boundary of one request: others must continue
            await self._refuse(answer, scope, error)
        finally:
            identity.answer_at_once = _not_at_once
            self._ended(scope, answer)

    def _ended(self, scope: Scope, answer: "_Answer") -> None:
        """Each part whatever happens to the others: what is held must be given back."""
        identity = identity_of(scope)
        endpoint = bounded_label(scope["path"], self._endpoints)
        parts: list[Callable[[], None]] = [
            identity.body.release,
            partial(self._metrics.answered, endpoint, answer.status, model=identity.model),
            partial(identity.trace.answered, answer.status),
            *identity.on_end,
        ]
        if self._refused is not None and _is_refusal(scope, endpoint, answer.status):
            parts.append(partial(self._refused, identity, endpoint, answer.status, answer.refusal))
        _call_each(parts)

    def _identify(self, scope: Scope, now: float) -> RequestIdentity:
        request_id = f"{_ids.getrandbits(128):032x}"
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        identity = RequestIdentity(
            request_id=request_id,
            client_request_id=None,
            arrived=now,
            body=BodyCharge(budget=self._bodies),
            trace=self._traces(scope, request_id, now),
            headers=headers,
        )
        # Few requests have any of these.
        if b"x-request-id" in headers:
            _name(identity, identity.header(b"x-request-id"))
        if _TIMEOUT_NAME in headers:
            identity.timeout = identity.header(_TIMEOUT_NAME)
        if _TICKET_NAME in headers:
            identity.ticket = RouteTicket(identity.header(_TICKET_NAME))
        return identity

    async def _refuse(self, answer: "_Answer", scope: Scope, error: Exception) -> None:
        identity = identity_of(scope)
        refusal = as_api_error(error)
        if refusal is None:
            logger.error(
                "request failed unexpectedly",
                exc_info=error,
                extra={"fields": about_request(identity.request_id, trace_id=identity.trace.trace_id)},
            )
            refusal = UNEXPECTED
        answer.refusal = refusal
        if not answer.started:
            await send_error(answer.send, refusal, path=scope["path"], request_id=identity.public_id)


def _last_answer(path: str) -> tuple[Message, Message]:
    body = error_body(UNEXPECTED, path=path, request_id="")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode("ascii"))]
    start = {"type": "http.response.start", "status": UNEXPECTED.status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}


_LAST_ANSWERS = {False: _last_answer(""), True: _last_answer(ANTHROPIC_PATH)}
"""By whether the path is Anthropic's."""


def _is_refusal(scope: Scope, endpoint: str, status: int) -> bool:
    """Of a request for work: unknown paths are text of outsiders, and polls would fill the list."""
    return scope["method"] == "POST" and endpoint == scope["path"] and status in _ERRORS


class _Answer:
    """Watches what is sent, and adds headers that every answer has."""

    def __init__(self, send: Send, scope: Scope, health: Health, writer: Bodies | None) -> None:
        """`writer`: for an application that sends the beginning of the body right after the head."""
        self._send = send
        self._scope = scope
        self._health = health
        self._writer = writer
        self._head: Message | None = None
        """Not sent yet: it leaves with the beginning of the body."""
        self.started = False
        self.status = 500
        self.refusal: ApiError | None = None

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            return self._start(self._begun(message))
        if self._head is not None and self._writer is not None:
            return self._begin(self._writer, self._head, message)
        return self._send(message)

    def at_once(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """See `AtOnce`."""
        if self._writer is None or self.started or self._head is not None:
            return False
        if not self._writer.begin(status, [*headers, *self._ours()], body, more=False):
            return False
        self.started, self.status = True, status
        return True

    def _start(self, message: Message) -> Awaitable[None]:
        if self._writer is None:
            sending = self._send(message)
            self.started = True
            return sending
        self._head = message
        return _nothing()

    async def _begin(self, writer: Bodies, head: Message, message: Message) -> None:
        begun = writer.begin(head["status"], head["headers"], message["body"], more=message.get("more_body", False))
        self.started, self._head = True, None
        if not begun:
            await self._send(head)
            await self._send(message)

    def _begun(self, message: Message) -> Message:
        self.status = message["status"]
        return {**message, "headers": [*message["headers"], *self._ours()]}

    def _ours(self) -> list[tuple[bytes, bytes]]:
        """Headers that every answer has."""
        identity = identity_of(self._scope)
        request_id = identity.public_id.encode("ascii")
        ours = [(b"x-request-id", request_id)]
        if speaks_anthropic(self._scope["path"]):
            ours.append((b"request-id", request_id))
        ours += identity.caller.headers()
        if self._health.draining:
            ours.append((b"connection", b"close"))
        return ours


async def _nothing() -> None:
    pass


def _call_each(parts: Sequence[Callable[[], None]]) -> None:
    """Whatever happens to those before it. Raises what the last failing one has raised."""
    for number, part in enumerate(parts, 1):
        try:
            part()
        except BaseException:
            _call_each(parts[number:])
            raise


def _check_head(scope: Scope, allowed: AllowedHosts) -> None:
    headers = scope["headers"]
    size = sum(map(len, chain.from_iterable(headers)))
    hosts = [value for name, value in headers if name == b"host"]
    if len(headers) > MAX_HEADER_FIELDS or size > MAX_HEADER_BYTES:
        raise ApiError(
            431,
            f"request headers are limited to {MAX_HEADER_FIELDS} fields and {MAX_HEADER_BYTES} bytes",
            kind="RequestHeaderFieldsTooLargeError",
        )
    _check_host(scope, hosts, allowed)
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_URL_BYTES:
        raise url_too_long()


def _check_host(scope: Scope, hosts: list[bytes], allowed: AllowedHosts) -> None:
    """The URL that other code composes must not depend on a header (Starlette CVE-2026-48710)."""
    if scope["http_version"] not in ("1.0", "1.1"):
        raise ApiError(505, "only HTTP/1.0 and HTTP/1.1 are spoken here", kind="HttpVersionNotSupportedError")
    if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
        raise bad_request(f"a request has one Host header, this one has {len(hosts)}", "Host")
    if hosts and not _SANE_HOST.fullmatch(hosts[0]):
        raise bad_request("the Host header must be a name or an address, with or without a port", "Host")
    if hosts and scope["path"] not in PROBE_PATHS and not allowed.allow(hosts[0].decode("latin-1")):
        raise ApiError(
            403,
            f"Host {quoted(hosts[0].decode('latin-1'))} is not one of this gateway's: name it with --allowed-hosts, or "
            "use an address",
            kind="PermissionDeniedError",
        )


def deadline_of(identity: RequestIdentity, *, wanted_s: float | None, most_s: float) -> float:
    """On the gateway's clock. `wanted_s` is the body's. Raises `ApiError` 400 for what is no duration."""
    if wanted_s is not None:
        most_s = min(most_s, _seconds(wanted_s, "timeout"))
    if identity.timeout is not None:
        most_s = min(most_s, _seconds(identity.timeout, TIMEOUT_HEADER))
    return identity.arrived + most_s


def _seconds(value: float | str, name: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    # The comparison refuses NaN as well.
    if not 0 < seconds < float("inf"):
        raise bad_request(f"{name} must be a number of seconds above 0, got {quoted(value)}", name)
    return seconds
