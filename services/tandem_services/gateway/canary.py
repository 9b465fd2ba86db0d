"""A canary: one short greedy request through a prefill and a decode worker, asked for by the operator.

    POST /canary    {"prefill": "pod-a", "decode": "pod-b"} through exactly these two;
                    {} through whom the router chooses, with a prefill worker where it would have done without one

On the administrators' port, for whoever has the deployment's order token or is on this machine. It is nobody's
request: no tenant is charged, it has no place in the queue, and nothing of it is found by others, for its cache salt is
its own. It passes when every token that was asked for has come, from the decode worker, with KV that the prefill worker
sent. An answer is 200 whatever became of it; 400, 401 and 403 are about the question.
"""

import asyncio
import logging
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec

from tandem_engine.clock import Clock
from tandem_engine.config import Role
from tandem_engine.errors import WireError
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest, HandoffSide, attempt_id
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import ApiError, bad_request
from tandem_services.gateway.attempt import Attempt, AttemptFailedError
from tandem_services.gateway.engine_requests import with_handoff
from tandem_services.gateway.explain import ChoiceRecord
from tandem_services.gateway.model_service import ModelService
from tandem_services.router.choice import NoWorkersError, RouteQuery, WorkerView

logger = logging.getLogger(__name__)

PROMPT = "The canary went down into the mine before the miners did, and sang as long as the air was good. " * 4
PROMPT_TOKENS = 48
"""Some pages, so that KV has to move, and so few that nobody notices."""
OUTPUT_TOKENS = 8
"""More than the first one, which the prefill worker computes."""

WorkerName = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]


class CanaryBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked."""

    prefill: WorkerName | None = None
    decode: WorkerName | None = None
    within_s: Annotated[float, msgspec.Meta(gt=0, le=120)] = 20.0


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of it."""

    passed: bool
    message: str
    """One sentence."""
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
        """Whom the router takes for a request like this one. It need not be reserved for so little."""
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
        for worker in self.service.chooser.workers():
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
