"""A whole sizing: search on the first half of a trace, proof on the second.

A fleet on one half of a trace is measured by the share of its requests that met the objectives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tandem_engine.base.errors import ConfigError
from tandem_lab.bench.load import Slo
from tandem_lab.simulate.replay import Outcome, Served, replay
from tandem_lab.simulate.report import is_good
from tandem_lab.simulate.requests import SimulatedRequest
from tandem_lab.sizing.load import LoadFigures, Objectives
from tandem_lab.sizing.rates import WorkerRates
from tandem_lab.sizing.search import Cell, Fleet, Found, Score, cells_of, search
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.policies import PolicyNames

TIMEOUT_S = 60.0


class TooManyMissedError(Exception):
    """The percentile is out of reach, whatever the rest of the run brings."""


@dataclass(kw_only=True, slots=True)
class Judge:
    """Counts the requests that missed an objective, or were refused."""

    slo: Slo
    total: int
    allowed: int
    """More misses end the run."""
    missed: int = 0

    def judge(self, served: Served) -> None:
        """Raises `TooManyMissedError`."""
        self.missed += served.refused or not is_good(served, self.slo)
        if self.missed > self.allowed:
            raise TooManyMissedError

    @property
    def attainment(self) -> float:
        return 1.0 - self.missed / self.total


@dataclass(kw_only=True)
class Evaluator:
    """Replays on a Redis of its own, which it empties before each run."""

    redis: RedisAddress
    wanted: Objectives
    context_length: int
    local_prefill_tokens: int
    seed: int = 0
    on_run: Callable[[str], None] = lambda _: None
    """Called with a description of each run before it begins."""
    _numbers: "count[int]" = field(default_factory=count)

    async def run(
        self, requests: Sequence[SimulatedRequest], cell: Cell, *, prefill: int, decode: int, whole: bool = False
    ) -> Score:
        """`whole`: to its end, however many requests miss. Raises `RedisUnavailableError`."""
        number = next(self._numbers)
        self.on_run(f"run {number + 1}: {prefill}P + {decode}D of {cell.rates.gpus} GPUs")
        await self._empty()
        wanted, total = self.wanted, len(requests)
        allowed = total if whole else math.floor((1 - wanted.percentile) * total + 1e-9)
        judge = Judge(slo=Slo(ttft_ms=wanted.ttft_s * 1e3, itl_ms=wanted.itl_s * 1e3), total=total, allowed=allowed)
        try:
            outcome = await replay(
                requests,
                cell.shape(prefill=prefill, decode=decode, context_length=self.context_length),
                redis=self.redis,
                cluster=f"sizing-{number}",
                policies=PolicyNames(),
                local_prefill_tokens=self.local_prefill_tokens,
                seed=self.seed,
                on_served=lambda: None,
                on_ended=judge.judge,
            )
        except TooManyMissedError:
            return Score(attainment=judge.attainment, ttft_s=math.inf, itl_s=math.inf, retractions=0, complete=False)
        return self._score(outcome, judge)

    def _score(self, outcome: Outcome, judge: Judge) -> Score:
        refused = [math.inf] * len(outcome.refused)
        return Score(
            attainment=judge.attainment,
            ttft_s=quantile([*(each.ttft_s for each in outcome.served), *refused], self.wanted.percentile),
            itl_s=quantile([*(each.mean_gap_s for each in outcome.served), *refused], self.wanted.percentile),
            retractions=sum(worker.done.retractions for worker in outcome.workers),
            complete=True,
        )

    async def _empty(self) -> None:
        client = RedisClient(self.redis, timeout_s=TIMEOUT_S)
        try:
            await client.command("FLUSHALL")
        finally:
            await client.close()


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked), max(1, math.ceil(share * len(ranked) - 1e-9))) - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    found: Found
    proof: Score
    """Of the cheapest fleet, on the second half."""

    @property
    def best(self) -> Fleet:
        return self.found.fleets[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """What is sized, for which load."""

    sized: Sequence[SimulatedRequest]
    """The first half, at `rate` times its rate."""
    proof: Sequence[SimulatedRequest]
    """The second half, as it was."""
    rate: float
    load: LoadFigures
    """Of `sized`."""
    wanted: Objectives
    rates: Sequence[WorkerRates]
    chunks: Sequence[int]
    context_length: int
    most_gpus: int
    local_prefill_tokens: int
    seed: int = 0

    async def run(self, redis: RedisAddress, on_run: Callable[[str], None]) -> Result:
        """Raises `ConfigError` where no fleet keeps the objectives, and `RedisUnavailableError`."""
        cells, refused = cells_of(self.rates, self.load, self.wanted, self.chunks)
        if not cells:
            raise ConfigError(f"the objectives cannot be met: {self._reasons(refused)}")
        evaluator = Evaluator(
            redis=redis,
            wanted=self.wanted,
            context_length=self.context_length,
            local_prefill_tokens=self.local_prefill_tokens,
            seed=self.seed,
            on_run=on_run,
        )

        async def run(cell: Cell, prefill: int, decode: int) -> Score:
            return await evaluator.run(self.sized, cell, prefill=prefill, decode=decode)

        found = await search(cells, self.load, self.wanted, most_gpus=self.most_gpus, run=run, refused=refused)
        if not found.fleets:
            raise ConfigError(
                f"--max-gpus {self.most_gpus}: no fleet of so many meets the objectives; raise it, or the objectives. "
                + self._reasons(refused)
            )
        best = found.fleets[0]
        proof = await evaluator.run(self.proof, best.cell, prefill=best.prefill, decode=best.decode, whole=True)
        return Result(found=found, proof=proof)

    def _reasons(self, refused: dict[int, str]) -> str:
        return "; ".join(f"{gpus} GPUs a worker: {reason}" for gpus, reason in refused.items())
