"""What only records or estimates ends no request: its errors are counted, logged once for each function, and replaced.

    @recording                       a function whose result is unused
    @estimating(lambda *_: None)     one that predicts: the fallback is called with the same arguments

`ApiError` passes: an estimate may refuse a request on purpose.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tandem_services.common.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_errors: Counter[str] = Counter()
"""Of this process, by function: all that are decorated, so that no label comes from elsewhere."""


def recording(function: Callable[P, None]) -> Callable[P, None]:
    """See the module docstring."""
    return estimating(_nothing)(function)


def estimating(otherwise: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """See the module docstring. `otherwise` returns what the function could have returned."""

    def isolated(function: Callable[P, T]) -> Callable[P, T]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        _errors[name] = 0

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except ApiError:
                raise
            except Exception:  # noqa: BLE001  # the boundary of what only records: counted and logged
                _note(name)
                result: T = otherwise(*args, **kwargs)
                return result

        return run

    return isolated


def errors() -> dict[str, int]:
    """Errors of this process so far, by function."""
    return dict(_errors)


class RecordingErrors(Collector):
    """The metric of them."""

    def __init__(self, prefix: str) -> None:
        self._name = f"{prefix}recording_errors"

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            self._name,
            "Errors in what only records or estimates, by function; requests went on without it",
            labels=["function"],
        )
        for name, count in sorted(_errors.items()):
            family.add_metric([name], count)
        yield family


def _note(name: str) -> None:
    _errors[name] += 1
    if _errors[name] == 1:
        logger.exception("%s has failed, and requests go on without it; further errors are only counted", name)


def _nothing(*args: object, **kwargs: object) -> None:
    del args, kwargs
