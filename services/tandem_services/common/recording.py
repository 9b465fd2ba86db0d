"""What only records or estimates ends no request: its errors are counted, logged once for each function, and replaced.

    @recording                       a function whose result is unused
    @estimating(lambda *_: None)     one that predicts: the fallback is called with the same arguments

`ApiError` passes: an estimate may refuse a request on purpose.
"""

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tandem_engine.base import recording as engine_recording
from tandem_engine.base.recording import errors
from tandem_services.common.errors import ApiError

__all__ = ["RecordingErrors", "errors", "estimating", "recording"]

P = ParamSpec("P")
T = TypeVar("T")


def recording(function: Callable[P, None]) -> Callable[P, None]:
    """See the module docstring."""
    return estimating(lambda *_, **__: None)(function)


def estimating(otherwise: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """See the module docstring. `otherwise` returns what the function could have returned."""
    return engine_recording.estimating(otherwise, passing=ApiError)


class RecordingErrors(Collector):
    """The metric of them."""

    def __init__(self, prefix: str) -> None:
        self._name = f"{prefix}recording_errors"

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            self._name,
            "Errors in what only records or estimates, by function; requests continued without it",
            labels=["function"],
        )
        for name, count in sorted(errors().items()):
            family.add_metric([name], count)
        yield family
