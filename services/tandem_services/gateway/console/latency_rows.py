"""Predicted against measured latency, as the console shows it: one row per model, kind of worker and placement."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

import msgspec

from tandem_services.gateway.models.service import ModelService
from tandem_services.gateway.observe.explain import RequestJournal
from tandem_services.gateway.observe.predictions import Judged, judged
from tandem_services.router.calibration import Factors

SAMPLES = 200
"""Requests that are looked at."""

MAX_ROWS = 64


class LatencyRow(Factors, frozen=True, kw_only=True):
    """Medians are of the last requests that were learned from; None without any."""

    model: str
    predicted_ttft_s: float | None
    measured_ttft_s: float | None
    predicted_itl_s: float | None
    measured_itl_s: float | None


def latency_rows(services: Iterable[ModelService], journal: RequestJournal) -> tuple[LatencyRow, ...]:
    """Of all models of a gateway."""
    seen: defaultdict[tuple[str, str, str], list[Judged]] = defaultdict(list)
    for record in journal.latest(SAMPLES):
        if (one := judged(record)) is not None:
            seen[record.model, one.prediction.kind, one.prediction.placement].append(one)
    rows = (
        _row(service.model.name, factors, seen[service.model.name, factors.kind, factors.placement])
        for service in services
        for factors in service.predictions.calibration.factors()
    )
    return tuple(rows)[:MAX_ROWS]


def _row(model: str, factors: Factors, seen: list[Judged]) -> LatencyRow:
    between = [
        (one.prediction.itl_s, one.measured.itl_s)
        for one in seen
        if one.prediction.itl_s is not None and one.measured.itl_s is not None
    ]
    return LatencyRow(
        **msgspec.structs.asdict(factors),
        model=model,
        predicted_ttft_s=_median(one.prediction.ttft_s for one in seen),
        measured_ttft_s=_median(one.measured.ttft_s for one in seen),
        predicted_itl_s=_median(predicted for predicted, _ in between),
        measured_itl_s=_median(measured for _, measured in between),
    )


def _median(values: Iterable[float]) -> float | None:
    found = [*values]
    return median(found) if found else None
