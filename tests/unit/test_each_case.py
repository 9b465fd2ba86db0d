"""A table in one test: every case that fails is named."""

import pytest

from tandem_testing.each_case import check_each


def is_even(number: int) -> None:
    assert number % 2 == 0, f"{number} is odd"


def test_all_cases_that_fail_are_named_with_their_reasons() -> None:
    with pytest.raises(AssertionError) as raised:
        check_each([1, 2, 3], is_even, name=lambda number: f"case {number}")
    first, *failures = str(raised.value).splitlines()[:1] + [
        line for line in str(raised.value).splitlines() if line.startswith("case ")
    ]
    assert first == "2 of 3 cases"
    assert [line.partition(" (")[0] for line in failures] == [
        "case 1: AssertionError: 1 is odd",
        "case 3: AssertionError: 3 is odd",
    ]


def test_exception_of_a_case_does_not_hide_the_others() -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 cases\n0: ZeroDivisionError"):
        check_each([0, 1], lambda number: 1 / number, name=str)


def test_table_without_cases_fails() -> None:
    with pytest.raises(AssertionError, match="there are no cases"):
        check_each([], is_even, name=str)
