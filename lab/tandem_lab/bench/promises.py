"""What a server says of the latency of a request before it has answered, and what became of it.

    x-tandem-predicted-ttft-ms     on responses: the predicted time to the first token
    Retry-After                    on rejections: when the same request will be served

Servers that say nothing of it, or not in numbers, have promised nothing.
"""

from collections.abc import Iterable, Mapping

import msgspec

PREDICTED = "x-tandem-predicted-ttft-ms"
RETRY_AFTER = "retry-after"
OBJECTIVES = {"ttft_ms": "x-slo-ttft-ms", "itl_ms": "x-slo-tpot-ms"}
"""Bounds of a run, and the headers by which a request has them as its objectives."""

MAX_DIGITS = 9
"""Both headers are whole numbers; a longer one is a mistake."""


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """Measured over predicted: 1 is right."""

    requests: int
    p10: float
    p50: float
    p90: float


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were rejected with a Retry-After and sent again at that time."""

    sent: int
    good: int
    """Of them, those that succeeded within every bound."""


def predicted_ttft_s(headers: Mapping[str, str]) -> float | None:
    """None where nothing is predicted."""
    milliseconds = _number(headers.get(PREDICTED))
    return milliseconds / 1e3 if milliseconds else None


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """None without a time, and for a date."""
    return _number(headers.get(RETRY_AFTER))


def ratios(measured_and_predicted: Iterable[tuple[float, float]]) -> Ratios | None:
    """None where nothing was predicted."""
    found = sorted(measured / predicted for measured, predicted in measured_and_predicted)
    if not found:
        return None

    def rank(share: float) -> float:
        return found[min(len(found) - 1, int(share * len(found)))]

    return Ratios(requests=len(found), p10=rank(0.1), p50=rank(0.5), p90=rank(0.9))


def _number(text: str | None) -> float | None:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
        return None
    return float(text)
