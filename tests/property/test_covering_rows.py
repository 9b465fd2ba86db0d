"""Every allowed pair of values occurs in some row, and no forbidden one in any."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_testing.pairs.covering import Axis, Forbidden, allowed_pairs, covering_rows, pairs_of


@st.composite
def arrays(draw: st.DrawFn) -> tuple[list[Axis], list[Forbidden]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    axes = [Axis(name, tuple(string.digits[:size])) for name, size in zip(string.ascii_letters, sizes, strict=False)]
    later = [value for axis in axes for value in [*axis.named()][1:]]
    pairs = [Forbidden(one, other) for one in later for other in later if one[0] < other[0]]
    return axes, draw(st.lists(st.sampled_from(pairs), max_size=8)) if pairs else []


@given(array=arrays(), seed=st.integers(0, 1000))
def test_every_allowed_pair_and_no_forbidden_one_is_in_a_row(array, seed) -> None:
    axes, forbidden = array
    rows = covering_rows(axes, forbidden, seed=seed)
    assert {pair for row in rows for pair in pairs_of(row)} == set(allowed_pairs(axes, forbidden))
    assert all([*row] == [axis.name for axis in axes] for row in rows)


@given(array=arrays(), seed=st.integers(0, 1000))
def test_seed_always_gives_the_same_rows(array, seed) -> None:
    assert covering_rows(*array, seed=seed) == covering_rows(*array, seed=seed)


def test_another_seed_gives_other_rows() -> None:
    axes = [Axis(name, ("0", "1", "2")) for name in "abcdef"]
    assert len({str(covering_rows(axes, seed=seed)) for seed in range(4)}) == 4


def test_covering_array_of_twelve_axes_has_at_most_25_rows() -> None:
    axes = [Axis(name, ("0", "1", "2")) for name in string.ascii_lowercase[:12]]
    assert len(covering_rows(axes)) <= 25


@pytest.mark.parametrize(
    ("forbidden", "message"),
    [
        (Forbidden(("a", "0"), ("b", "1")), "the first value of a, '0', must be allowed with every other"),
        (Forbidden(("a", "1"), ("b", "7")), "b has no value '7'"),
        (Forbidden(("a", "1"), ("c", "1")), "c has no value '1'"),
        (Forbidden(("a", "1"), ("a", "2")), "is one axis"),
    ],
)
def test_pair_that_cannot_be_forbidden_is_an_error(forbidden, message) -> None:
    with pytest.raises(ValueError, match=message):
        covering_rows([Axis("a", ("0", "1", "2")), Axis("b", ("0", "1"))], [forbidden])
