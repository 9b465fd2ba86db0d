"""A prefill and a decode engine in one process, with real sockets and real NIXL between them.

Every request goes to both at once with the two ends of one handoff, as the gateway sends it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import msgspec

from tandem_engine.addresses import LOOPBACK
from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.generation import Generation, Generations
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide
from tandem_engine.scheduler.stream import Sink
from tandem_engine.verify.ranks import EngineMaker

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
