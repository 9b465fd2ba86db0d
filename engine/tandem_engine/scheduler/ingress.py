"""Requests and aborts from outside.

    GenerateRequest ─▶ Request ─▶ limits ─▶ a stage keeps it, or it waits
                                     └────▶ rejected: one output with an error, nothing else happens

A rejection is an output, not an exception: the client waits for one, and a stage has to notify the other worker of a
handoff [abort-both-ways].

`Prefetching` keeps new requests out of the queue while more of their prefix is on its way:

    1. arrives   the gateway has named an engine that has more of the prefix, or storage has the next blocks: their
                 transfer starts, and the request waits in `Prefetching`
    2. joins     the queue at its place of arrival, when all blocks are here, or failed, or the time is up

Other requests are served in the meantime, so only requests that benefit are delayed. A request that also needs a
grammar or an adapter waits for all at once: in `Queues.compiling` until these are there, then here for what is still
missing.
"""

import logging
import math
from dataclasses import dataclass

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import (
    DrainingError,
    EngineError,
    InvalidRequestError,
    PausedError,
    QueueFullError,
)
from tandem_engine.base.names import RequestId
from tandem_engine.config import SchedulerConfig
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import Finish, FinishReason
from tandem_engine.messages.requests import (
    GenerateRequest,
    HandoffSide,
    about_attempt,
    check_group,
    check_tenant,
    space_of,
)
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.finishing import Endings
from tandem_engine.scheduler.gates.adapters import AdapterGate
from tandem_engine.scheduler.gates.grammar import GrammarGate
from tandem_engine.scheduler.migration import is_moving
from tandem_engine.scheduler.prompt_results import PooledPrompt, PromptLogprobs, check_pooling
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.sessions import Sessions
from tandem_engine.scheduler.stage import AwaitedPages
from tandem_engine.scheduler.stop import ModelFacts


@dataclass(kw_only=True, slots=True)
class Prefetching:
    """The way from arrival to the waiting queue."""

    memory: KvMemory
    queues: Queues
    clock: Clock

    def enter(self, req: Request) -> None:
        """Give a new request its place: in the queue, or in `prefetching`."""
        entered = self.queues.enter(req)
        if not entered and not req.held_up:
            return
        # What another engine has is more than what is here, in whatever tier: that is why it was named.
        awaited = self._fetch(req) or self._read(req)
        if not entered:
            if awaited is not None:
                self.queues.reading[req] = awaited
        elif awaited is None:
            self.queues.waiting.join(req)
        else:
            self.queues.prefetching[req] = awaited

    def poll(self) -> bool:
        """Let those join whose time has come. True if any did."""
        if not self.queues.prefetching:
            return False
        now = self.clock.now()
        ready = [req for req, awaited in self.queues.prefetching.items() if awaited.done or now >= awaited.until]
        for req in ready:
            del self.queues.prefetching[req]
            self.queues.join(req)
        return bool(ready)

    def _fetch(self, req: Request) -> AwaitedPages | None:
        """Begin to bring its prefix from another engine. None if there is nothing to wait for."""
        if req.fetch is None:
            return None
        begun = (stage.fetch(req) for stage in self.queues.stages)
        return next((awaited for awaited in begun if awaited is not None), None)

    def _read(self, req: Request) -> AwaitedPages | None:
        """Begin to read its prefix from storage. None if there is nothing to wait for."""
        host = self.memory.host
        if host is None or host.cache is None:
            return None
        tokens = req.token_ids(0, req.seq_len)
        until = self.clock.now() + host.prefetch_timeout
        prefetch = host.cache.prefetch(tokens, space=req.space, max_tokens=len(tokens) - 1, until=until)
        return prefetch if host.prefetch_timeout else None


logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Ingress:
    """Turns messages into queued requests, and pending finishes."""

    config: SchedulerConfig
    model: ModelFacts
    capacity_tokens: int
    """Tokens that the whole KV pool can hold."""
    allow_stop_strings: bool
    clock: Clock
    queues: Queues
    endings: Endings
    sessions: Sessions
    prefetching: Prefetching
    gate: GrammarGate
    adapters: AdapterGate
    tally: Tally
    draining: bool = False
    paused: bool = False
    """Paused, and new requests had better go elsewhere."""

    def add(self, message: GenerateRequest, client: bytes) -> Request | None:
        """Give `message` a home. None when it was refused, or needs no computing."""
        if self.knows(RequestId(message.rid)):
            # An answer under this name would end the attempt that is running.
            fields = about_attempt(message.rid, message.trace)
            logger.warning("request %r arrived twice; the second is ignored", message.rid, extra={"fields": fields})
            return None
        try:
            whole = self.sessions.whole_turn(message)
        except InvalidRequestError as error:
            self.endings.refuse(self._request(message, client), error)
            return None
        req = self._request(whole, client)
        try:
            self._check_room(message)
            check_pooling(message, hidden_size=self.model.hidden_size)
            self.adapters.check(message.adapter)
            self._check(req)
        except EngineError as error:
            self.endings.refuse(req, error)
            return None
        self.tally.requests += 1
        self.sessions.begin_turn(message, req)
        complete = self._completeness(req)
        if complete is not None:
            self.endings.finish(req, complete)
            return None
        self.adapters.begin(req, message.adapter)
        self.queues.tenants.see(req.tenant, self.clock.now())
        if not any(stage.accept(req) for stage in self.queues.stages):
            self.prefetching.enter(req)
        return req

    def _completeness(self, req: Request) -> Finish | None:
        """How a request ends whose resumed output is complete already."""
        if len(req.output_ids) >= req.sampling.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        return self.gate.begin(req)

    def abort(self, rid: RequestId, finish: Finish) -> None:
        """Record a pending finish; the next plan or settlement acts. Ignores unknown ids [unknown-id-ignored]."""
        req = self.queues.requests.get(rid)
        if req is not None:
            req.to_finish = req.to_finish or finish
            self.queues.to_finish.append(req)
            return
        for stage in self.queues.stages:
            if stage.abort(rid, finish):
                return

    def abort_group(self, client: bytes, name: str, finish: Finish) -> None:
        """As `abort`, for every request of a client's group."""
        for req in [req for req in self.queues.live() if req.client == client and req.group == name]:
            self.abort(req.rid, finish)

    def knows(self, rid: RequestId) -> bool:
        """Whether an attempt of this name is alive here."""
        kept = (req for stage in self.queues.stages for req in stage.live())
        return rid in self.queues.requests or any(req.rid == rid for req in kept)

    def _request(self, message: GenerateRequest, client: bytes) -> Request:
        now = self.clock.now()
        return Request(
            rid=RequestId(message.rid),
            origin_input_ids=message.input_ids,
            sampling=message.sampling,
            resumed=len(message.resume_ids),
            handoff=message.handoff,
            fetch=message.fetch,
            space=space_of(message),
            adapter=message.adapter,
            priority=message.priority,
            tenant=message.tenant,
            group=message.group,
            session=None if message.session is None else message.session.id,
            client=client,
            deadline=None if message.deadline_s is None else now + message.deadline_s,
            arrived_at=now,
            output_ids=list(message.resume_ids),
            prompt_logprobs=_prompt_logprobs(message),
            pooled=PooledPrompt.wanted_by(message.pooling, len(message.input_ids)),
            streamed=len(message.resume_ids),
            trace=message.trace,
        )

    def check(self, message: GenerateRequest) -> None:
        """Raise `InvalidRequestError` for a request that this engine can never serve, or not as its session is now, and
        `AdapterMissingError` for one whose adapter is not here."""
        check_pooling(message, hidden_size=self.model.hidden_size)
        self.adapters.check(message.adapter)
        self._check(self._request(self.sessions.whole_turn(message), b""))

    def _check_room(self, message: GenerateRequest) -> None:
        if self.draining and not is_moving(message):
            raise DrainingError("this worker is draining and takes no new requests")
        if self.paused:
            raise PausedError("an operator has paused this worker; it takes no new requests")
        waiting = self.queues.num_waiting + self.queues.waiting_in_stages()
        if waiting >= self.config.max_queued_requests:
            raise QueueFullError(f"{waiting} requests are waiting, the limit is {self.config.max_queued_requests}")

    def _check(self, req: Request) -> None:
        if req.deadline is not None and not math.isfinite(req.deadline):
            raise InvalidRequestError("deadline_s must be a finite number of seconds", param="deadline_s")
        if req.handoff is not None:
            req.handoff.check()
        if req.fetch is not None:
            req.fetch.check()
        if req.trace is not None:
            req.trace.check()
        check_group(req.group)
        check_tenant(req.tenant)
        req.sampling.check(vocab_size=self.model.vocab_size)
        self.gate.check(req.sampling.grammar)
        self._check_tokens("input_ids", req.origin_input_ids)
        self._check_tokens("resume_ids", req.output_ids)
        self._check_length(req)
        req.sampling.check_prompt(req.prompt_len)
        if req.sampling.stop and not self.allow_stop_strings:
            raise InvalidRequestError(
                "stop strings need a tokenizer and this engine has none; use stop_token_ids", param="stop"
            )

    def _check_tokens(self, field: str, ids: tuple[int, ...] | list[int]) -> None:
        if not ids:
            return
        outside = next((token for token in (min(ids), max(ids)) if not 0 <= token < self.model.vocab_size), None)
        if outside is not None:
            raise InvalidRequestError(
                f"{field} has token id {outside}, the vocabulary ends at {self.model.vocab_size - 1}", param=field
            )

    def _check_length(self, req: Request) -> None:
        limit = self.model.context_length
        if not req.prompt_len:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", param="input_ids")
        if req.prompt_len >= limit:
            raise InvalidRequestError(
                f"the prompt has {req.prompt_len} tokens, this model's context of {limit} tokens leaves room "
                f"for at most {limit - 1}",
                param="input_ids",
            )
        if req.prompt_len + req.sampling.max_tokens > limit:
            raise InvalidRequestError(
                f"max_tokens is {req.sampling.max_tokens}, after a prompt of {req.prompt_len} tokens the context "
                f"of {limit} tokens leaves room for {limit - req.prompt_len}",
                param="max_tokens",
            )
        # The last token is sampled, never computed: it needs no KV.
        needed = req.prompt_len + req.sampling.max_tokens - 1
        if needed > self.capacity_tokens:
            raise InvalidRequestError(
                f"prompt and max_tokens need KV of {needed} tokens, this engine's whole pool holds "
                f"{self.capacity_tokens}",
                param="max_tokens",
            )


def _prompt_logprobs(message: GenerateRequest) -> PromptLogprobs | None:
    """The worker that computes the prompt gathers them, and sends them with its first output."""
    if message.handoff is not None and message.handoff.side is HandoffSide.RECEIVE:
        return None
    return PromptLogprobs.wanted_by(message.sampling, len(message.input_ids))
