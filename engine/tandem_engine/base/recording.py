"""What only records or estimates ends no engine: its errors are counted, logged once for each function, and replaced.

    @recording                       a function whose result is unused
    @estimating(lambda *_: None)     one that estimates: the fallback is called with the same arguments

`EngineError` passes: a lost rank must be noticed wherever it is met.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tandem_engine.base.errors import EngineError

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_errors: Counter[str] = Counter()
"""Of this process, by function."""


def recording(function: Callable[P, None]) -> Callable[P, None]:
    """See the module docstring."""
    return estimating(_nothing)(function)


def estimating(
    otherwise: Callable[..., Any], *, passing: type[Exception] = EngineError
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """See the module docstring. `otherwise` returns what the function could have returned; `passing` is raised."""

    def isolated(function: Callable[P, T]) -> Callable[P, T]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        _errors[name] = 0

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except passing:
                raise
            except Exception:  # noqa: BLE001  # the boundary of what only records: counted and logged
                _note(name)
                result: T = otherwise(*args, **kwargs)
                return result

        return run

    return isolated


def errors() -> dict[str, int]:
    """Errors of this process so far, by function: all that are decorated."""
    return dict(_errors)


def _note(name: str) -> None:
    _errors[name] += 1
    if _errors[name] == 1:
        logger.exception("%s has failed, and requests continue without it; further errors are only counted", name)


def _nothing(*args: object, **kwargs: object) -> None:
    del args, kwargs
