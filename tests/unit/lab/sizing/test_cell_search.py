"""The search finds what trying every fleet finds, with fewer runs."""

from random import Random

import pytest

from tandem_lab.sizing.load import LoadFigures, Objectives
from tandem_lab.sizing.rates import WorkerRates
from tandem_lab.sizing.search import Cell, CellSearch, Fleet, Score, pareto, search

WANTED = Objectives(ttft_s=1.0, itl_s=0.1, percentile=0.95)


def rates(gpus: int = 1) -> WorkerRates:
    return WorkerRates(
        gpus=gpus,
        prefill_rate=1000.0 * gpus,
        steps=((1, 0.01), (64, 0.02)),
        token_bytes=1.0,
        transfer_rate=1e9,
        pool_tokens=10_000,
        measured=True,
    )


def cell(gpus: int = 1, running: int = 8) -> Cell:
    return Cell(rates=rates(gpus), chunk_tokens=2048, running=running)


def score(attainment: float, *, ttft: float = 1.0, itl: float = 0.1) -> Score:
    return Score(attainment=attainment, ttft_s=ttft, itl_s=itl, retractions=0, complete=True)


def corner(random: Random) -> list[tuple[int, int]]:
    """Fleets that just keep the objectives: with fewer prefill workers more decode workers are needed."""
    prefill, decode = random.randrange(1, 6), random.randrange(6, 16)
    found = [(prefill, decode)]
    while decode > 1 and random.random() < 0.8:
        prefill, decode = prefill + random.randrange(1, 4), decode - random.randrange(1, min(5, decode))
        found.append((prefill, decode))
    return found


@pytest.mark.parametrize("seed", range(40))
async def test_smallest_sum_is_found_for_any_shape(seed):
    corners = corner(Random(seed))
    runs = []

    async def run(_: Cell, prefill: int, decode: int) -> Score:
        runs.append((prefill, decode))
        return score(1.0 if any(prefill >= p and decode >= d for p, d in corners) else 0.5)

    finder = CellSearch(cell=cell(), least_decode=1, least_total=2, most_total=64, percentile=0.95, run=run)
    best = await finder.fewest()
    assert sum(best) == min(map(sum, corners))
    assert len(runs) == len(set(runs)) < 60


async def test_no_fleet_within_the_limit_gives_none():
    async def run(_: Cell, prefill: int, decode: int) -> Score:
        return score(0.9 if prefill + decode < 20 else 1.0)

    finder = CellSearch(cell=cell(), least_decode=1, least_total=2, most_total=19, percentile=0.95, run=run)
    assert await finder.fewest() is None


async def test_cell_that_cannot_be_cheaper_is_not_run():
    load = LoadFigures(seconds=10.0, uncached=(1000,) * 30, outputs=100, longest=1010, context=1005.0)
    ran = set()

    async def run(one: Cell, prefill: int, decode: int) -> Score:
        ran.add(one.rates.gpus)
        return score(1.0 if prefill + decode >= 5 else 0.0)

    found = await search([cell(8), cell(1)], load, WANTED, most_gpus=100, run=run, refused={})
    assert ran == {1}
    assert found.fleets[0].gpus == 5


def test_pareto_front_keeps_cells_not_dominated():
    cheap = Fleet(cell=cell(), prefill=1, decode=1, score=score(0.95, ttft=0.9))
    fast = Fleet(cell=cell(), prefill=2, decode=2, score=score(1.0, ttft=0.2))
    worse = Fleet(cell=cell(), prefill=2, decode=3, score=score(1.0, ttft=0.3))
    assert pareto([cheap, fast, worse]) == [cheap, fast]
