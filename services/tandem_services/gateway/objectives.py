"""Latency objectives of a request: the longest time to its first token, and between tokens in the mean.

A request has them from its body (`slo`), from its headers, or from the gateway's flags, in this order and each by
itself. `observe.predictions` counts which were met, and `queueing.slo_admission` rejects requests by them where the
gateway is set to.

The number that a request may name is a duration in milliseconds: above 0, at most a day. Anything else is a 400 with
the name of the header or field.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

from tandem_engine.base.logs import quoted
from tandem_services.common.errors import bad_request

STRICT_FACTOR = 2.0
"""A strict gateway rejects what is predicted to take this many times its objective."""


class SloMode(StrEnum):
    """Of a gateway."""

    OBSERVE = "observe"
    """Objectives reject nothing."""
    SHED = "shed"
    """A request of priority below 0 that is predicted to miss an objective, unless its workers are idle."""
    STRICT = "strict"
    """A request that is predicted to take more than `STRICT_FACTOR` times an objective, unless its workers are idle."""


MAX_MS = 86_400_000.0
Milliseconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_MS)]

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
_TTFT, _TPOT = TTFT_HEADER.encode("ascii"), TPOT_HEADER.encode("ascii")


class SloFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The field `slo` of a body."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None


class Objectives(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one request. None: it has none."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None


NO_OBJECTIVES = Objectives()


def objectives_of(
    headers: Iterable[tuple[bytes, bytes]], body: SloFields | None, defaults: Objectives = NO_OBJECTIVES
) -> Objectives:
    """`headers` as ASGI has them. Raises `ApiError` 400 for a header that is given twice or is no duration."""
    ttft_s = tpot_s = None
    for name, value in headers:
        if name == _TTFT:
            ttft_s = _seconds(value, TTFT_HEADER, given=ttft_s)
        elif name == _TPOT:
            tpot_s = _seconds(value, TPOT_HEADER, given=tpot_s)
    if body is not None:
        ttft_s = ttft_s if body.ttft_ms is None else body.ttft_ms / 1000
        tpot_s = tpot_s if body.tpot_ms is None else body.tpot_ms / 1000
    if ttft_s is None and tpot_s is None:
        return defaults
    return Objectives(
        ttft_s=defaults.ttft_s if ttft_s is None else ttft_s, itl_s=defaults.itl_s if tpot_s is None else tpot_s
    )


def _seconds(value: bytes, name: str, *, given: float | None) -> float:
    text = value.decode("latin-1")
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    # The comparison rejects NaN as well.
    if not 0 < milliseconds <= MAX_MS:
        raise bad_request(
            f"{name} must be a number of milliseconds above 0, at most {MAX_MS:.0f}, got {quoted(text)}", name
        )
    if given is not None:
        raise bad_request(f"{name} must be given once", name)
    return milliseconds / 1000
