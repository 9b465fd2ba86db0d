"""Latency objectives in the status of a ModelService: three conditions and `status.slo`.

    SloMet                   enough requests of the last minutes met their objectives
    SloFeasible              some number of workers meets them with these prompts
    LatencyModelCalibrated   predicted latencies are near measured ones; otherwise workers follow queues

A change of each is an event, with figures. All are informational: a service is ready without them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem_operator.api.slo import Slo, SloStatus
from tandem_operator.api.types import Condition, condition

SLO_MET = "SloMet"
SLO_FEASIBLE = "SloFeasible"
LATENCY_CALIBRATED = "LatencyModelCalibrated"
SLO_CONDITIONS = (SLO_MET, SLO_FEASIBLE, LATENCY_CALIBRATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class SloSeen:
    """How well the objectives of a service are met."""

    attainment: float
    """Share of requests that met all of their objectives."""
    goodput_per_s: float
    calibration: float
    """Measured over predicted latency, of the part farthest from 1."""
    is_met: bool | None
    """None before enough requests have come."""
    infeasible: str = ""
    """Why no number of workers meets them; empty if some number does."""
    is_calibrated: bool = True


def slo_status(slo: Slo, seen: SloSeen | None, before: SloStatus | None) -> SloStatus | None:
    """`before`, until something is known."""
    if seen is None or seen.is_met is None:
        return before
    return SloStatus(
        attainment=seen.attainment,
        goodput_per_second=seen.goodput_per_s,
        calibration=seen.calibration,
        feasible=not seen.infeasible,
        summary=f"{seen.attainment:g}/{slo.percentile:g}",
    )


def slo_conditions(slo: Slo | None, seen: SloSeen | None) -> Iterator[Condition]:
    """Nothing for a service without objectives."""
    if slo is None:
        return
    if seen is None or seen.is_met is None:
        yield condition(SLO_MET, None, "FewRequests", "too few requests with objectives have ended")
    else:
        figures = (
            f"{seen.attainment:g} of the recent requests met {_objectives(slo)}; {slo.percentile:g} are to. "
            f"{seen.goodput_per_s:g} per second did"
        )
        yield condition(SLO_MET, seen.is_met, "SloMet" if seen.is_met else "SloMissed", figures)
    if seen is None:
        yield condition(SLO_FEASIBLE, None, "NoMetrics", "no metrics have been read yet")
        yield condition(LATENCY_CALIBRATED, None, "NoMetrics", "no metrics have been read yet")
        return
    if not seen.is_calibrated:
        yield condition(SLO_FEASIBLE, None, "NotCalibrated", "latencies are not predicted well enough to tell")
    else:
        yield condition(
            SLO_FEASIBLE, not seen.infeasible, "Infeasible" if seen.infeasible else "Feasible", seen.infeasible
        )
    if seen.is_calibrated:
        yield condition(LATENCY_CALIBRATED, True, "Calibrated", f"measured / predicted is {seen.calibration:g}")
    else:
        message = f"measured / predicted is beyond 1/3 or 3 ({seen.calibration:g}): workers follow queues instead"
        yield condition(LATENCY_CALIBRATED, False, "OutOfBounds", message)


def _objectives(slo: Slo) -> str:
    parts = [
        f"{text} {seconds:g} s"
        for text, seconds in (("time to the first token", slo.ttft_seconds), ("between tokens", slo.itl_seconds))
        if seconds is not None
    ]
    return f"the objectives ({', '.join(parts)})"
