"""A table in one test: all cases that fail are named at once.

A test of microseconds for each of hundreds of cases costs a hundred times as much in pytest. `parametrize` stays right
where a case takes longer, has fixtures of its own, or is run alone.
"""

import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def check_each(cases: Iterable[Case], check: Callable[[Case], object], *, name: Callable[[Case], str]) -> None:
    """Raises `AssertionError` with the names of all cases in which `check` raises, and where; and if there are none."""
    failures, count = [], 0
    for count, case in enumerate(cases, 1):  # noqa: B007 - the last one is the number of cases
        try:
            check(case)
        except Exception as error:  # noqa: BLE001 - it is reported, after the other cases
            place = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(f"{name(case)}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    assert count, "there are no cases"
    assert not failures, f"{len(failures)} of {count} cases\n" + "\n".join(failures)
