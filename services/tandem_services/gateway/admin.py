"""Administrators' routes on a separate port (`--admin-port`), and the canary request of the operator.

    /live /ready /health /metrics /version     probes and Prometheus, without a key
    /requests/{id}/explain                     any tenant's request
    /v1/adapters                               adapters with their digests and workers, in pages
    /v1/load_lora_adapter                      POST: load an adapter on all workers; also without /v1
    /v1/unload_lora_adapter                    POST: the opposite
    /operator/adapters                         the same for the Kubernetes operator (`api.operator_adapters`)
    /drain                                     POST: same effect as SIGTERM
    /canary                                    POST: a test request through a pair of workers (`Canary`)
    /console                                   the console page, with its scripts and styles, without a key
    /console/data/…                            the console's data
    /v1/models and the generation routes       same as on the API port, for the console's playground
    /openapi.json                              description of the API port, for the console's view of it

With a key file, every route except probes, the page, /canary and /operator/… needs a key whose entry has `"admin":
true`. /canary and /operator/…, and without a key file every other POST that changes something, need the order token
(`common.tokens`), also from the same machine.

A canary is one short greedy request through a prefill and a decode worker:

    POST /canary    {"prefill": "pod-a", "decode": "pod-b"} through exactly these two;
                    {} through the router's choice, with a prefill worker even if the router would have used none
                    "model": NAME selects one of several models; default: the first. With
                    "cluster" it has to be that of this fleet

It passes when the decode worker has returned every requested token with KV that the prefill worker sent. It belongs to
no tenant, bypasses the queue, and has its own cache salt, so that no other request finds its KV. The status is 200
whether it passes or fails; 400, 401 and 403 report an invalid or unauthorized call.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import WireError
from tandem_engine.base.logs import quoted
from tandem_engine.base.release import RELEASE
from tandem_engine.config import Role
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest, HandoffSide, attempt_id
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError, bad_request, not_found
from tandem_services.gateway.api.adapter_list import adapter_list
from tandem_services.gateway.api.operator_adapters import OPERATOR_PATHS, OperatorAdapterRoutes
from tandem_services.gateway.app import Gateway, adapter_routes, boundary_of, description_route, generation_routes
from tandem_services.gateway.console.routes import Console
from tandem_services.gateway.dispatch.attempt import Attempt, AttemptFailedError
from tandem_services.gateway.dispatch.dispatcher import with_handoff
from tandem_services.gateway.http.authentication import PROBES, Authentication, require_order
from tandem_services.gateway.http.body import BodyDecoder, decode_body, read_body
from tandem_services.gateway.http.middleware import identity_of
from tandem_services.gateway.http.monitoring_routes import http_error, json_response, operations_routes
from tandem_services.gateway.models.service import ModelService
from tandem_services.gateway.observe.explain import ChoiceRecord
from tandem_services.gateway.processes.others import EXPLAIN_PATH
from tandem_services.router.decision import NoWorkersError, RouteQuery, WorkerView

logger = logging.getLogger(__name__)
PROMPT = "The canary went down into the mine before the miners did, and sang as long as the air was good. " * 4

PROMPT_TOKENS = 48
"""Some pages, so that KV must be transferred, and few enough to cost almost nothing."""

OUTPUT_TOKENS = 8
"""More than the first one, which the prefill worker computes."""

WorkerName = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]


class CanaryBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    cluster: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    prefill: WorkerName | None = None
    decode: WorkerName | None = None
    within_s: Annotated[float, msgspec.Meta(gt=0, le=120)] = 20.0


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of it."""

    passed: bool
    message: str
    """One sentence."""
    unserved: bool = False
    """The model is not served here, or not yet."""
    prefill: str = ""
    decode: str = ""
    """Names of the workers."""
    tokens: int = 0
    pages: int = 0
    """KV pages that were moved."""
    seconds: float = 0.0


class CanaryFailedError(Exception):
    """The sentence is for the operator."""


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: WorkerView
    decode: WorkerView


@dataclass(frozen=True, slots=True)
class Canary:
    """Runs canaries of one model service."""

    service: ModelService
    clock: Clock

    async def run(self, body: CanaryBody) -> CanaryReport:
        """Never raises for what workers do; `ApiError` 400 for half a pair."""
        began = self.clock.now()
        try:
            async with asyncio.timeout(body.within_s):
                pair = await self._pair(body)
                report = await self._through(pair, body.within_s)
        except CanaryFailedError as error:
            report = CanaryReport(passed=False, message=str(error))
        except TimeoutError:
            report = CanaryReport(passed=False, message=f"no answer within {body.within_s:g} s")
        report = msgspec.structs.replace(report, seconds=round(self.clock.now() - began, 3))
        log = logger.info if report.passed else logger.warning
        log("canary", extra={"fields": msgspec.to_builtins(report)})
        return report

    async def _pair(self, body: CanaryBody) -> Pair:
        if (body.prefill is None) is not (body.decode is None):
            raise bad_request("prefill and decode must be given together, or not at all", "prefill")
        if body.prefill is not None and body.decode is not None:
            return Pair(self._named(body.prefill), self._named(body.decode))
        decode, prefill = await self._chosen()
        return Pair(prefill or self._some_prefill(decode), decode)

    def _named(self, name: str) -> WorkerView:
        for worker in self.service.chooser.workers():
            if worker.worker_id == name:
                return worker
        raise CanaryFailedError(f"worker {name} is not registered")

    async def _chosen(self) -> tuple[WorkerView, WorkerView | None]:
        """The router's choice for such a request. No reservation is needed for so small a load."""
        query = RouteQuery(
            request_id=attempt_id(f"canary-{uuid.uuid4().hex}", 0, 0),
            model=self.service.model.name,
            token_ids=await self._prompt(),
            max_tokens=OUTPUT_TOKENS,
        )
        try:
            choice = await self.service.chooser.choose(query)
        except NoWorkersError as error:
            raise CanaryFailedError(f"no worker can serve it: {error}") from error
        await self.service.chooser.release(choice)
        return choice.decode, choice.prefill

    def _some_prefill(self, decode: WorkerView) -> WorkerView:
        for worker in self.service.chooser.peers(decode):
            if worker.role is Role.PREFILL and worker.compat_hash == decode.compat_hash:
                return worker
        raise CanaryFailedError(f"no prefill worker can be paired with {decode.worker_id}")

    async def _prompt(self) -> tuple[int, ...]:
        work = partial(self.service.model.tokenizer.encode, PROMPT, add_special_tokens=False)
        return tuple(await self.service.prompts.threads.run(work, characters=len(PROMPT)))[:PROMPT_TOKENS]

    async def _through(self, pair: Pair, within_s: float) -> CanaryReport:
        if pair.prefill.compat_hash != pair.decode.compat_hash:
            raise CanaryFailedError(
                f"{pair.prefill.worker_id} and {pair.decode.worker_id} hold other weights or another layout of KV"
            )
        record = ChoiceRecord(index=0)
        rid = attempt_id(f"canary-{uuid.uuid4().hex}", 0, 0)
        attempt = Attempt(rid, 0, record, began=self.clock.now())
        try:
            self._send(attempt, pair, await self._request(rid, within_s))
            tokens = await _tokens(attempt)
        except AttemptFailedError as failure:
            code = f", code {failure.code}" if failure.code else ""
            raise CanaryFailedError(f"{failure}{code}") from failure
        except (ApiError, WireError) as error:
            raise CanaryFailedError(str(error)) from error
        finally:
            attempt.close()
        report = CanaryReport(
            passed=True, message="", prefill=pair.prefill.worker_id, decode=pair.decode.worker_id, tokens=tokens
        )
        return _judged(report, record)

    async def _request(self, rid: str, within_s: float) -> GenerateRequest:
        return GenerateRequest(
            rid=rid,
            input_ids=await self._prompt(),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
            cache_salt=rid,
            deadline_s=within_s,
            release=RELEASE,
        )

    def _send(self, attempt: Attempt, pair: Pair, request: GenerateRequest) -> None:
        for worker, side, peer in (
            (pair.decode, HandoffSide.RECEIVE, pair.prefill),
            (pair.prefill, HandoffSide.SEND, pair.decode),
        ):
            half = with_handoff(request, side, 0, peer=peer)
            attempt.submit(self.service.engines.connect(worker), half, is_prefill=side is HandoffSide.SEND)


async def _tokens(attempt: Attempt) -> int:
    count = 0
    while True:
        accepted = await attempt.next()
        count += len(accepted.token_ids)
        if accepted.finish is not None:
            if accepted.finish.reason is not FinishReason.LENGTH:
                raise CanaryFailedError(f"it ended with {accepted.finish.reason.value}: {accepted.finish.error}")
            return count


def _judged(report: CanaryReport, record: ChoiceRecord) -> CanaryReport:
    pages = 0 if record.transfer is None else record.transfer.pages
    passed, message = True, f"{report.tokens} tokens and {pages} pages from {report.prefill} to {report.decode}"
    if report.tokens != OUTPUT_TOKENS:
        passed, message = False, f"{report.tokens} of {OUTPUT_TOKENS} tokens came"
    elif pages == 0:
        passed, message = False, f"no KV page moved from {report.prefill} to {report.decode}"
    return msgspec.structs.replace(report, passed=passed, message=message, pages=pages)


def _not_served(gateway: Gateway, model: str | None) -> str:
    if model is None:
        return "no model is served here yet"
    why = gateway.models.unserved.get(model, "")
    return f"model '{quoted(model)}' is not served here yet" + (f": {quoted(why)}" if why else "")


CANARY = "/canary"

OPEN_PATHS = PROBES | {"/metrics", "/version", CANARY, EXPLAIN_PATH} | OPERATOR_PATHS
"""Without an API key; what the operator sends has a guard of its own."""


def create_admin_app(gateway: Gateway, *, drain: Callable[[], None], console: Console | None = None) -> Starlette:
    """The second application of a gateway. `drain` is called on the event loop and returns at once."""

    async def explain(request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        record = gateway.answering.journal.find_of_any_caller(request_id)
        if record is None:
            raise not_found(f"No recent request has the id '{quoted(request_id)}'.", "request_id")
        return json_response(record)

    async def adapters(request: Request) -> Response:
        return adapter_list(gateway.models, request)

    async def begin_drain(request: Request) -> Response:
        # With a key file, authentication has checked for an administrator's key by now.
        require_order(request, gateway.order_access, by_key=gateway.access is not None)
        drain()
        return json_response({"status": "draining"}, 202)

    canaries = BodyDecoder(CanaryBody, strict=True)

    async def run_canary(request: Request) -> Response:
        require_order(request, gateway.order_access)
        body = await decode_body(canaries.decode, await read_body(request))
        service = gateway.models.select(body.model, body.cluster)
        if service is None:
            return json_response(CanaryReport(passed=False, unserved=True, message=_not_served(gateway, body.model)))
        return json_response(await Canary(service, gateway.clock).run(body))

    async def list_models(request: Request) -> Response:
        return json_response(gateway.models.listing(identity_of(request.scope).caller))

    async def explain_here(request: Request) -> Response:
        """For another process of this gateway, of one tenant."""
        asked = request.query_params
        record = gateway.answering.journal.find(asked.get("request_id", ""), tenant=asked.get("tenant", ""))
        if record is None:
            raise not_found("No recent request of this process has this id.", "request_id")
        return json_response(record)

    access = gateway.access
    if access is not None:
        # The key alone authorizes a request: no path of this port is for users.
        access = replace(access, open_paths=OPEN_PATHS, admin_paths=None)
    routes = [
        *operations_routes(gateway.health, gateway.registry, metrics=True),
        Route("/requests/{request_id}/explain", explain, methods=["GET"]),
        Route("/v1/adapters", adapters, methods=["GET"]),
        Route("/drain", begin_drain, methods=["POST"]),
        Route(CANARY, run_canary, methods=["POST"]),
        *adapter_routes(gateway),
        *OperatorAdapterRoutes(gateway.models, gateway.order_access).routes(),
    ]
    if gateway.place is not None:
        # On a socket that only this user's processes can open; `front` passes no request on to it.
        routes.append(Route(EXPLAIN_PATH, explain_here, methods=["GET"]))
    if console is not None:
        access = console.admit(access)
        # What the playground and the description of the API require, for the administrator who uses them.
        routes += [*console.routes(), Route("/v1/models", list_models), *generation_routes(gateway)]
        routes.append(description_route(gateway, metrics=False))
    return Starlette(
        routes=routes,
        middleware=[boundary_of(gateway), Middleware(Authentication, access=access)],
        exception_handlers={HTTPException: http_error},
    )
