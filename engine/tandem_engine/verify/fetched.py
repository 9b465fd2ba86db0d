"""Two engines, one of which fetches the prefix of every prompt from the other, with real NIXL between them.

    computed before at the one ─▶ asked for by the other, which computes the rest ─▶ ended there

Every request names the engine that has its prefix, as a gateway does where that is predicted to be faster.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import msgspec

from tandem_engine.addresses import LOOPBACK
from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.generation import Generation
from tandem_engine.messages.requests import GenerateRequest, PrefixFetch
from tandem_engine.verify.pair import MAX_TURNS, Pair
from tandem_engine.verify.ranks import EngineMaker

PATIENCE_S = 30.0
"""Nothing is lost between the two, and the machine may be slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """A pair used as two engines that compute alone."""

    pair: Pair

    @classmethod
    @contextmanager
    def build(
        cls, lender: EngineMaker, asker: EngineMaker, config: EngineConfig, *, host: str = LOOPBACK
    ) -> Iterator[Self]:
        """Raises `TransportUnavailableError` when NIXL cannot be loaded."""
        with Pair.build(lender, asker, config, host=host) as pair:
            yield cls(pair=pair)

    @property
    def lender(self) -> Engine:
        return self.pair.prefill

    @property
    def asker(self) -> Engine:
        return self.pair.decode

    def generate(self, requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        """As `Engine.generate`, after the other engine has done the same."""
        self._run(self.lender, [msgspec.structs.replace(each, rid=f"{each.rid} before") for each in requests], stagger)
        return self._run(self.asker, [self._told(request) for request in requests], stagger)

    def _told(self, request: GenerateRequest) -> GenerateRequest:
        tokens = len(request.input_ids) + len(request.resume_ids)
        return msgspec.structs.replace(
            request, fetch=PrefixFetch(peer=self.lender.me, tokens=tokens, within_s=PATIENCE_S)
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
                self.asker.step()
                self.lender.step()
            turns += 1
            assert turns < MAX_TURNS, "the pair does not come to an end"
        return self.pair.generations.take_all([request.rid for request in requests])
