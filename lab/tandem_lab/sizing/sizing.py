"""A whole sizing: search on the first half of a trace, proof on the second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_engine.base.errors import ConfigError
from tandem_lab.simulate.requests import SimulatedRequest
from tandem_lab.sizing.evaluate import Evaluator
from tandem_lab.sizing.load import LoadFigures, Objectives
from tandem_lab.sizing.rates import WorkerRates
from tandem_lab.sizing.search import Cell, Fleet, Found, Score, cells_of, search
from tandem_services.common.redis_client import RedisAddress


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
