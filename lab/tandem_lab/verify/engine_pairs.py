"""Pairs of engines in one process, with real sockets and real NIXL between them.

Pair      a prefill and a decode engine. Every request goes to both at once with the two ends of one handoff, as the
          gateway sends it
Drained   one engine migrates its running requests to the other. A second attempt has a different name, as a gateway
          gives it:
          started on the first ─▶ migration is requested ─▶ aborted there, sent by it, received by the other ─▶
          finished on the other
Fetched   one engine fetches the prefix of every prompt from the other. Every request names the engine that has its
          prefix, as a gateway does where that is predicted to be faster:
          computed before on the one ─▶ requested by the other, which computes the rest ─▶ finished there
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

import msgspec

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.names import RequestId
from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.engine.stats import Generation, Generations
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, PrefixFetch
from tandem_engine.scheduler.output_stream import Sink
from tandem_lab.verify.engines import EngineMaker

MAX_TURNS = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two engines around the same weights, stepped in turn."""

    prefill: Engine
    decode: Engine
    generations: Generations

    @classmethod
    @contextmanager
    def build(
        cls,
        prefill: EngineMaker,
        decode: EngineMaker,
        config: EngineConfig,
        *,
        sink: Sink | None = None,
        host: str = LOOPBACK,
    ) -> Iterator[Self]:
        """With `sink`, outputs go there, and `generate` is not for use. `host`: of both engines' sockets.

        Raises `TransportUnavailableError` when NIXL cannot be loaded.
        """
        generations = Generations()
        with ExitStack() as stack:
            context = IpcContext()
            stack.callback(context.close)
            engines = [
                stack.enter_context(
                    maker.engine(
                        config,
                        sink=sink or generations,
                        port=EnginePort(worker_id=name, incarnation=f"{name}@1", context=context, host=host),
                    )
                )
                for maker, name in ((prefill, "verify-prefill"), (decode, "verify-decode"))
            ]
            yield cls(prefill=engines[0], decode=engines[1], generations=generations)

    def generate(self, requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        """Run `requests` to their end on both engines; see `Engine.generate`."""
        waiting = list(reversed(requests))
        turns = 0
        while waiting or not (self.prefill.idle and self.decode.idle):
            if waiting:
                self._add(waiting.pop())
            for _ in range(stagger if waiting else 1):
                self.prefill.step()
                self.decode.step()
            turns += 1
            assert turns < MAX_TURNS, "the pair does not come to an end"
        return self.generations.take_all([request.rid for request in requests])

    def _add(self, request: GenerateRequest) -> None:
        self.generations.expect(request.rid, resumed=len(request.resume_ids))
        self.decode.add(self._end(request, HandoffSide.RECEIVE, self.prefill))
        self.prefill.add(self._end(request, HandoffSide.SEND, self.decode))

    @staticmethod
    def _end(request: GenerateRequest, side: HandoffSide, other: Engine) -> GenerateRequest:
        handoff = Handoff(side=side, room=request.rid, generation=1, peer=other.me)
        return msgspec.structs.replace(request, handoff=handoff)


@dataclass(kw_only=True, slots=True)
class Askers:
    """A sink that also notes which requests should leave."""

    generations: Generations = field(default_factory=Generations)
    asked: list[str] = field(default_factory=list)

    def __call__(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        self.generations(client, outputs)
        self.asked += [output.rid for output in outputs if output.leaving]


@dataclass(kw_only=True, slots=True)
class Drained:
    """A pair used as two decode workers."""

    pair: Pair
    askers: Askers
    begun: dict[str, GenerateRequest] = field(default_factory=dict)
    moved: dict[str, GenerateRequest] = field(default_factory=dict)
    """The second attempts, by the name of the first."""

    @classmethod
    @contextmanager
    def build(
        cls, leaver: EngineMaker, taker: EngineMaker, config: EngineConfig, *, host: str = LOOPBACK
    ) -> Iterator[Self]:
        """Raises `TransportUnavailableError` when NIXL cannot be loaded."""
        askers = Askers()
        with Pair.build(leaver, taker, config, host=host, sink=askers) as pair:
            drained = cls(pair=pair, askers=askers)
            drained.leaver.decode_elsewhere(wanted=True)
            yield drained

    @property
    def leaver(self) -> Engine:
        return self.pair.prefill

    @property
    def taker(self) -> Engine:
        return self.pair.decode

    def generate(self, requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        """As `Engine.generate`; each output is what both engines gave of it."""
        waiting = list(reversed(requests))
        turns = 0
        while waiting or not (self.leaver.idle and self.taker.idle):
            if waiting:
                self._begin(waiting.pop())
            for _ in range(stagger if waiting else 1):
                self.leaver.step()
                self.taker.step()
                self._move_requester()
            turns += 1
            assert turns < MAX_TURNS, "the pair does not come to an end"
        return [self._whole(request.rid) for request in requests]

    def _begin(self, request: GenerateRequest) -> None:
        self.begun[request.rid] = request
        self._expect(request)
        self.leaver.add(request)

    def _move_requester(self) -> None:
        asked, self.askers.asked = self.askers.asked, []
        for rid in asked:
            if rid not in self.moved and self.askers.generations.by_rid[rid].finished is None:
                self._move(self.begun[rid])

    def _move(self, request: GenerateRequest) -> None:
        so_far = self.askers.generations.by_rid[request.rid].token_ids
        again = msgspec.structs.replace(
            request,
            rid=f"{request.rid} moved",
            resume_ids=(*request.resume_ids, *so_far),
            sampling=request.sampling.without_prompt_logprobs(),
        )
        self.moved[request.rid] = again
        self._expect(again)
        self.leaver.abort(RequestId(request.rid))
        self.taker.add(self._end(again, HandoffSide.RECEIVE, self.leaver))
        self.leaver.add(self._end(again, HandoffSide.SEND, self.taker))

    @staticmethod
    def _end(request: GenerateRequest, side: HandoffSide, other: Engine) -> GenerateRequest:
        moving = side is HandoffSide.SEND
        handoff = Handoff(side=side, room=request.rid, generation=1, peer=other.me, moving=moving)
        return msgspec.structs.replace(request, handoff=handoff)

    def _expect(self, request: GenerateRequest) -> None:
        self.askers.generations.expect(request.rid, resumed=len(request.resume_ids))

    def _whole(self, rid: str) -> Generation:
        """The output of a request, from its one attempt or from both."""
        again = self.moved.get(rid)
        if again is None:
            return self.askers.generations.take_all([rid])[0]
        first, second = self.askers.generations.take_all([rid, again.rid])
        # An attempt that is left may still stream a step that was under way; no client reads it any more.
        kept = len(again.resume_ids) - len(self.begun[rid].resume_ids)
        first.token_ids = first.token_ids[:kept] + second.token_ids
        first.logprobs = first.logprobs[:kept] + second.logprobs
        first.transfer, first.finished = second.transfer, second.finished
        return first


PATIENCE_S = 30.0
"""Nothing is lost between the two, and the machine may be slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """A pair used as two engines that compute alone."""

    pair: Pair

    @classmethod
    @contextmanager
    def build(
        cls, source: EngineMaker, requester: EngineMaker, config: EngineConfig, *, host: str = LOOPBACK
    ) -> Iterator[Self]:
        """Raises `TransportUnavailableError` when NIXL cannot be loaded."""
        with Pair.build(source, requester, config, host=host) as pair:
            yield cls(pair=pair)

    @property
    def source(self) -> Engine:
        return self.pair.prefill

    @property
    def requester(self) -> Engine:
        return self.pair.decode

    def generate(self, requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        """As `Engine.generate`, after the other engine has done the same."""
        self._run(self.source, [msgspec.structs.replace(each, rid=f"{each.rid} before") for each in requests], stagger)
        return self._run(self.requester, [self._with_source(request) for request in requests], stagger)

    def _with_source(self, request: GenerateRequest) -> GenerateRequest:
        tokens = len(request.input_ids) + len(request.resume_ids)
        return msgspec.structs.replace(
            request, fetch=PrefixFetch(peer=self.source.me, tokens=tokens, within_s=PATIENCE_S)
        )

    def _run(self, engine: Engine, requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        waiting = list(reversed(requests))
        turns = 0
        while waiting or not engine.scheduler.idle:
            if waiting:
                request = waiting.pop()
                self.pair.generations.expect(request.rid, resumed=len(request.resume_ids))
                engine.add(request)
            for _ in range(stagger if waiting else 1):
                self.requester.step()
                self.source.step()
            turns += 1
            assert turns < MAX_TURNS, "the pair does not come to an end"
        return self.pair.generations.take_all([request.rid for request in requests])
