"""What one look at a service says about its latency objectives. Pure.

The status is written when it changes, so small changes of figures are none (`_steady`). Whether objectives are met
changes only when the attainment has passed the percentile by a hundredth: otherwise noise would be events.
"""

import math
import re

from tandem_operator.api.slo import Slo
from tandem_operator.api.types import ROLES
from tandem_operator.planning.slo import SloSeen
from tandem_operator.scaling.policy import ScalingConfig, need_of
from tandem_operator.telemetry.samples import LoadReading, SloFigures

MIN_JUDGED = 20
"""Requests before their share counts."""

BAND = 0.01
"""Below the percentile by so much an objective is missed, or by what the share of so few requests varies by itself; it
is met again at the percentile."""

MIN_GOODPUT = 0.01
"""Fewer requests per second are none: otherwise the figures of an idle service would fade, and be written, for days."""

_FIGURES = re.compile(r"[\d.]+")


def slo_seen(seen: LoadReading, config: ScalingConfig, slo: Slo | None, before: SloSeen | None) -> SloSeen | None:
    """None for a service without objectives; `before` where metrics cannot be used."""
    if slo is None:
        return None
    if seen.load is None or seen.load.error() or seen.latency is None:
        return before
    needs = [need_of(role, seen.load, config) for role in ROLES]
    now = SloSeen(
        attainment=round(seen.latency.attainment, 3),
        goodput_per_s=_goodput(seen.latency),
        calibration=round(seen.latency.calibration, 2),
        is_met=_is_met(seen.latency, slo, before),
        infeasible="; ".join(need.infeasible for need in needs if need.infeasible),
        is_calibrated=seen.load.is_calibrated,
    )
    return now if before is None or _differ(before, now) else before


def _is_met(figures: SloFigures, slo: Slo, before: SloSeen | None) -> bool | None:
    known = None if before is None else before.is_met
    if figures.judged < MIN_JUDGED:
        return known
    deviation = math.sqrt(slo.percentile * (1.0 - slo.percentile) / figures.judged)
    wanted = slo.percentile - (0.0 if known is False else max(BAND, deviation))
    return figures.attainment >= wanted


def _goodput(figures: SloFigures) -> float:
    return float(f"{figures.goodput_per_s:.3g}") if figures.goodput_per_s >= MIN_GOODPUT else 0.0


def _differ(before: SloSeen, now: SloSeen) -> bool:
    """By more than a hundredth of the attainment, or a tenth of another figure."""

    def facts(seen: SloSeen) -> tuple[object, ...]:
        return seen.is_met, seen.is_calibrated, _FIGURES.sub("#", seen.infeasible)

    if facts(before) != facts(now) or abs(before.attainment - now.attainment) > BAND:
        return True
    pairs = ((before.goodput_per_s, now.goodput_per_s), (before.calibration, now.calibration))
    return any(abs(then - value) > 0.1 * max(then, value) for then, value in pairs)
