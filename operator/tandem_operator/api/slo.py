"""`spec.slo`: latency objectives of a service, and how well they are met."""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.types import Api, Rule, Seconds


class Slo(Api, frozen=True, kw_only=True):
    """Latency objectives. Gateways count which requests meet them; with `autoscaling.mode` internal or external the
    number of workers follows from them."""

    ttft_seconds: Seconds | None = None
    """Longest time from the arrival of a request to its first token, in seconds; default: no objective."""
    itl_seconds: Seconds | None = None
    """Longest mean time between the tokens of a response, in seconds; default: no objective."""
    percentile: Annotated[float, msgspec.Meta(ge=0.5, le=0.999)] = 0.95
    """Share of requests that are to meet each objective."""
    admission: Literal["observe", "shed", "strict"] = "observe"
    """observe: gateways reject no request because of its objectives. shed: those of priority below 0 that are predicted
    to miss one. strict: any that is predicted to take more than twice an objective."""

    RULES: ClassVar = (
        Rule(
            "has(self.ttftSeconds) || has(self.itlSeconds)",
            "slo: no objective; set ttftSeconds or itlSeconds, or remove slo",
        ),
    )


class SloStatus(Api, frozen=True, kw_only=True):
    """How well the objectives of `spec.slo` are met, over the last minutes."""

    attainment: float = 0.0
    """Share of requests that met all of their objectives. Rejected and failed requests have not."""
    goodput_per_second: float = 0.0
    """Requests per second that met all of their objectives."""
    calibration: float = 1.0
    """Median of measured over predicted latency, the part farthest from 1; 1 is right."""
    feasible: bool = True
    """Whether some number of workers meets the objectives with the prompts of the last minutes."""
    summary: str = ""
    """Attainment and the share that is asked for: for `kubectl get`."""
