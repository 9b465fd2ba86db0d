"""Duration of a step that decodes, as a linear function of its batch, fitted while the engine serves.

    seconds = base + sequences × per sequence + KV tokens × per KV token + chunk tokens × per chunk token

`LeastSquares` is recursive least squares with forgetting: a step counts half as much after `HALF_LIFE` further steps.
Coefficients that recent batches do not determine keep their values: forgetting makes none of them less certain than it
was before the first step.

Left out are the first `COLD_S` seconds of serving, and the steps after anything that makes steps slow without their
batch being the reason: kernels that are compiled, swaps, pauses and idle time.

The fit is a statistic. No error in it may end a step, so errors are counted and the step is left out.
"""

import logging
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from operator import mul

from tandem_engine.base.clock import Clock
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.messages.stats import MAX_STEP_S, StepFit
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)

COLD_S = 30.0
"""Seconds from the first step on that are not representative: caches, clocks and pools warm up."""

SAMPLED = 4
"""One step of so many is fitted: enough, and then the fit costs the scheduler next to nothing."""

HALF_LIFE = 2_000
"""Steps."""

GAP_S = 1.0
"""Without a step for longer, the engine was idle or paused."""

UNDISTURBED = 8
"""Steps after a disturbance that are left out."""

MIN_SAMPLES = 32
"""Steps that are fitted before the fit is reported."""

SCALES = (1.0, 16.0, 16_384.0, 512.0)
"""Typical values of what a step is fitted by, so that no coefficient is much less certain than another at the start."""

UNCERTAIN = 100.0
"""Variance of each coefficient before the first step, over that of a step's duration."""

MIN_UNCERTAIN = 1e-9
"""Added with each step, far above what rounding takes: a variance that rounding makes negative would grow."""


@dataclass(slots=True)
class LeastSquares:
    """Four coefficients, of scaled inputs."""

    forgetting: float
    coefficients: list[float] = field(default_factory=lambda: [0.0] * len(SCALES))
    _covariance: list[list[float]] = field(
        default_factory=lambda: [
            [UNCERTAIN * (row == other) for other in range(len(SCALES))] for row in range(len(SCALES))
        ]
    )

    def add(self, inputs: list[float], value: float) -> None:
        """One observation. Raises `ValueError` and changes nothing if it makes no sense."""
        covariance = self._covariance
        gained = [sum(map(mul, row, inputs)) for row in covariance]
        spread = self.forgetting + sum(map(mul, gained, inputs))
        error = value - sum(map(mul, self.coefficients, inputs))
        moved = [old + gain / spread * error for old, gain in zip(self.coefficients, gained, strict=True)]
        if not (spread > 0.0 and all(map(isfinite, moved))):
            raise ValueError(f"a step of {value} s cannot be fitted by {inputs}")
        self.coefficients = moved
        left = [
            [old - row_gain * gain / spread for old, gain in zip(row, gained, strict=True)]
            for row, row_gain in zip(covariance, gained, strict=True)
        ]
        # Scaling a row and its column alike keeps the matrix positive.
        limits = [min(1.0, sqrt(UNCERTAIN * self.forgetting / row[at])) for at, row in enumerate(left)]
        self._covariance = [
            [
                old * limit * other / self.forgetting + MIN_UNCERTAIN * (at == column)
                for column, (old, other) in enumerate(zip(row, limits, strict=True))
            ]
            for at, (row, limit) in enumerate(zip(left, limits, strict=True))
        ]


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """One per scheduler."""

    stopwatch: Clock
    tally: Tally
    errors: int = 0
    """Steps that could not be fitted although they should have been."""
    samples: int = 0
    _fit: LeastSquares = field(default_factory=lambda: LeastSquares(0.5 ** (SAMPLED / HALF_LIFE)))
    _began: float | None = None
    """When the first step settled."""
    _settled_at: float = -inf
    _disturbances: int = 0
    _left_out: int = 0
    """Steps to leave out."""
    _steps: int = 0
    _exposed_s: float = 0.0
    """Of scheduling, until the last step."""

    def note(self, batch: ScheduleBatch, spent_s: float, tokens_per_run: float) -> None:
        """A step that decodes has settled. `spent_s`: of the device; `tokens_per_run`: that each sequence got."""
        try:
            self._note(batch, spent_s, tokens_per_run)
        except Exception:
            self.errors += 1
            if self.errors == 1:
                logger.exception("a step cannot be fitted; further errors are only counted")

    def report(self) -> StepFit | None:
        """None before there is one. No coefficient is negative: a batch never makes a step shorter."""
        if self.samples < MIN_SAMPLES:
            return None
        scaled = (
            min(max(0.0, value), MAX_STEP_S) / scale
            for value, scale in zip(self._fit.coefficients, SCALES, strict=True)
        )
        base, sequence, kv_token, chunk_token = scaled
        return StepFit(base_s=base, sequence_s=sequence, kv_token_s=kv_token, chunk_token_s=chunk_token)

    def _note(self, batch: ScheduleBatch, spent_s: float, tokens_per_run: float) -> None:
        exposed_s = self.tally.schedule_s - self.tally.overlap_hidden_s
        scheduled_s, self._exposed_s = exposed_s - self._exposed_s, exposed_s
        if not self._undisturbed(self.stopwatch.now()):
            return
        self._steps += 1
        if self._steps % SAMPLED:
            return
        decodes = batch.decodes
        kv_tokens = sum(req.seq_len for req in decodes) + sum(extend.start for extend in batch.extends)
        inputs = (1.0, len(decodes), kv_tokens, batch.extend_tokens)
        scaled = [value / scale for value, scale in zip(inputs, SCALES, strict=True)]
        self._fit.add(scaled, (spent_s + scheduled_s) / tokens_per_run)
        self.samples += 1

    def _undisturbed(self, now: float) -> bool:
        """Whether the step that has just settled took as long as its batch requires."""
        idle, self._settled_at = now - self._settled_at > GAP_S, now
        disturbances = COMPILED.counts.serving + self.tally.swapped_in + self.tally.swapped_out
        if idle or disturbances != self._disturbances:
            self._disturbances, self._left_out = disturbances, UNDISTURBED
        if self._began is None:
            self._began = now
        if self._left_out:
            self._left_out -= 1
            return False
        return now - self._began >= COLD_S
