"""Look-ups in the index, against a search of the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.speculative.ngram import CANDIDATES, NgramIndex


def index_of(text, *, shortest=2, longest=4, pieces=None) -> NgramIndex:
    index = NgramIndex(shortest=shortest, longest=longest)
    start = 0
    for size in pieces or [len(text)]:
        index.append(text[start : start + size])
        start += size
    index.append(text[start:])
    return index


def searched(text, limit, *, shortest, longest) -> tuple[int, ...]:
    """The same by comparing everything: the newest candidates first, a longer context wins."""
    tail = tuple(text[-shortest:])
    ends = [end for end in range(len(text) - 1, shortest - 1, -1) if tuple(text[end - shortest : end]) == tail]
    if len(text) < shortest or not ends:
        return ()

    def context(end: int) -> int:
        length = 0
        while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        return length

    best = max(ends[:CANDIDATES], key=context)
    grown = list(text)
    for _ in range(limit):
        grown.append(grown[best + len(grown) - len(text)])
    return tuple(grown[len(text) :])


texts = st.lists(st.integers(0, 3), max_size=200)


@given(text=texts, shortest=st.integers(1, 3), more=st.integers(0, 3), limit=st.integers(1, 9))
def test_index_finds_matches_of_a_full_search(text, shortest, more, limit):
    index = index_of(text, shortest=shortest, longest=shortest + more)
    expected = searched(text, limit, shortest=shortest, longest=shortest + more)
    assert index.continuation(limit) == expected
    assert index.repeats() == bool(expected)


@given(text=texts, pieces=st.lists(st.integers(0, 90), max_size=6))
def test_index_is_equal_for_any_split_of_a_text(text, pieces):
    assert index_of(text, pieces=pieces).continuation(5) == index_of(text).continuation(5)
    assert len(index_of(text, pieces=pieces)) == len(text)


def test_longer_context_beats_a_newer_occurrence():
    text = [1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3]
    assert index_of(text, shortest=2, longest=3).continuation(1) == (70,)
    assert index_of(text, shortest=2, longest=2).continuation(1) == (80,)


def test_ngram_repetition_at_text_end_continues():
    assert index_of([5, 1, 2, 3, 1, 2, 3]).continuation(7) == (1, 2, 3, 1, 2, 3, 1)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4, 5]])
def test_text_without_repetition_has_no_continuation(text):
    assert index_of(text).continuation(4) == ()
    assert not index_of(text).repeats()


def test_repeated_token_is_looked_up_in_bounded_time():
    index = index_of([7] * 5000, shortest=1, longest=32)
    assert index.continuation(3) == (7, 7, 7)
