"""The cheapest fleet that meets the objectives: kinds of workers, and how many of each role.

    cells    tensor-parallel size x chunk x sequences of a decode step, cheapest lower bound first. A cell whose bound
             costs as much as what was found is skipped
    in one   fleets grow from the bound until one meets the objectives. Then, for each number of decode workers,
             bisection finds the fewest prefill workers, as long as the sum gets smaller. More workers of a role are
             taken never to make a fleet worse, so the result of one run decides others without a run

A run is a replay of the trace with the product's router and queue (`tandem_lab.simulate`). One that cannot reach the
percentile any more ends early.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tandem_lab.simulate.fleet import FleetShape
from tandem_lab.sizing.load import LoadFigures, Objectives, infeasible, most_running, worker_load
from tandem_lab.sizing.rates import WorkerRates
from tandem_lab.traces import TRACE_BLOCK

RUNNING = (8, 16, 32, 64, 128, 256, 512)
GROWTH = 1.35
"""Of a fleet that was too small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One kind of worker."""

    rates: WorkerRates
    chunk_tokens: int
    running: int
    """`max_running_requests` of decode workers."""

    def shape(self, *, prefill: int, decode: int, context_length: int) -> FleetShape:
        return FleetShape(
            prefill=prefill,
            decode=decode,
            cache_blocks=max(1, self.rates.pool_tokens // TRACE_BLOCK),
            block_tokens=TRACE_BLOCK,
            max_sequences=self.running,
            context_length=context_length,
            times=self.rates.times(self.chunk_tokens),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How well a fleet kept the objectives."""

    attainment: float
    """Share of all requests that met both; of a run that ended early, the most that it could have reached."""
    ttft_s: float
    """At the percentile asked for."""
    itl_s: float
    """The same of the mean time between tokens."""
    retractions: int
    complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A cell in numbers, and its score on the first half."""

    cell: Cell
    prefill: int
    decode: int
    score: Score

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    @property
    def gpus(self) -> int:
        return self.workers * self.cell.rates.gpus


Run = Callable[[Cell, int, int], Awaitable[Score]]
"""Replays the first half on a cell with so many prefill and decode workers."""


@dataclass(kw_only=True)
class CellSearch:
    """Of one cell. `fewest` once."""

    cell: Cell
    least_decode: int
    least_total: int
    most_total: int
    percentile: float
    run: Run
    scores: dict[tuple[int, int], Score] = field(default_factory=dict)

    async def fewest(self) -> tuple[int, int] | None:
        """(Prefill, decode) of the smallest sum that meets the objectives; None if at most `most_total` do not."""
        found = await self._any()
        if found is None:
            return None
        prefill, decode = found
        # A good sum early makes the walk short.
        prefill = await self._fewest_prefill(decode, prefill)
        best = (prefill, decode)
        for fewer in range(self.least_decode, sum(best)):
            rest = sum(best) - 1 - fewer
            if rest < 1:
                break
            if await self._meets(rest, fewer):
                best = (await self._fewest_prefill(fewer, rest), fewer)
        return best

    async def _any(self) -> tuple[int, int] | None:
        total = self.least_total
        while total <= self.most_total:
            # Decode workers are grown with the prefill workers, so that neither role is what is missing.
            decode = min(total - 1, max(self.least_decode, round(total * self.least_decode / self.least_total)))
            if await self._meets(total - decode, decode):
                return total - decode, decode
            if total == self.most_total:
                return None
            total = min(self.most_total, math.ceil(total * GROWTH))
        return None

    async def _fewest_prefill(self, decode: int, enough: int) -> int:
        low, high = 1, enough
        while low < high:
            middle = (low + high) // 2
            if await self._meets(middle, decode):
                high = middle
            else:
                low = middle + 1
        return low

    async def _meets(self, prefill: int, decode: int) -> bool:
        if prefill + decode < self.least_total or decode < self.least_decode:
            return False
        for (known_prefill, known_decode), score in self.scores.items():
            met = score.attainment >= self.percentile
            if met and known_prefill <= prefill and known_decode <= decode:
                return True
            if not met and known_prefill >= prefill and known_decode >= decode:
                return False
        score = self.scores[prefill, decode] = await self.run(self.cell, prefill, decode)
        return score.attainment >= self.percentile


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search leaves."""

    fleets: list[Fleet]
    """All that meet the objectives, the cheapest first."""
    refused: dict[int, str]
    """GPUs of a worker → why no number of them meets the objectives."""
    runs: int


def cells_of(
    rates: Sequence[WorkerRates], load: LoadFigures, wanted: Objectives, chunks: Sequence[int]
) -> tuple[list[Cell], dict[int, str]]:
    """Kinds of workers that may meet the objectives, and why the others cannot."""
    cells, refused = [], {}
    for each in rates:
        reason = infeasible(load, each, wanted)
        if reason is not None:
            refused[each.gpus] = reason
            continue
        most = most_running(each, wanted)
        running = [batch for batch in RUNNING if batch <= most][-2:] or [most]
        cells += [Cell(rates=each, chunk_tokens=chunk, running=batch) for chunk in chunks for batch in running]
    return cells, refused


async def search(
    cells: Sequence[Cell], load: LoadFigures, wanted: Objectives, *, most_gpus: int, run: Run, refused: dict[int, str]
) -> Found:
    """The fewest GPUs of each cell that is worth looking at."""
    bounds = {cell: worker_load(load, cell.rates, cell.running) for cell in cells}
    fleets: list[Fleet] = []
    runs, least_gpus = 0, most_gpus + 1
    for cell in sorted(cells, key=lambda each: (bounds[each].least_total * each.rates.gpus, -each.running)):
        most_total = (least_gpus - 1) // cell.rates.gpus
        if bounds[cell].least_total > most_total:
            continue
        finder = CellSearch(
            cell=cell,
            least_decode=bounds[cell].least_decode,
            least_total=max(bounds[cell].least_total, bounds[cell].least_decode + 1),
            most_total=most_total,
            percentile=wanted.percentile,
            run=run,
        )
        best = await finder.fewest()
        runs += len(finder.scores)
        fleets += [
            Fleet(cell=cell, prefill=prefill, decode=decode, score=score)
            for (prefill, decode), score in finder.scores.items()
            if score.complete and score.attainment >= wanted.percentile
        ]
        if best is not None:
            least_gpus = min(least_gpus, sum(best) * cell.rates.gpus)
    fleets.sort(key=lambda each: (each.gpus, -each.score.attainment))
    return Found(fleets=fleets, refused=refused, runs=runs)


def pareto(fleets: Sequence[Fleet]) -> list[Fleet]:
    """Those that no other one beats in GPUs, TTFT and ITL at once; the cheapest first."""

    def beats(other: Fleet, fleet: Fleet) -> bool:
        figures = [(each.gpus, each.score.ttft_s, each.score.itl_s) for each in (other, fleet)]
        return all(a <= b for a, b in zip(*figures, strict=True)) and figures[0] != figures[1]

    return [fleet for fleet in fleets if not any(beats(other, fleet) for other in fleets)]
