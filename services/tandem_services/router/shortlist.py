"""The few entries that are looked at closely, so that a decision costs the same in a large fleet."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

PAIR_ENDS = 4
"""Prefill workers and decode workers of which every pair is priced, and workers that a prefix may be fetched from."""

T = TypeVar("T")


def shortlist(entries: Sequence[T], costs: Sequence[float], random: Random) -> Sequence[T]:
    """The `PAIR_ENDS` cheapest; which of equals is left to chance."""
    if len(entries) <= PAIR_ENDS:
        return entries
    order = sorted(range(len(entries)), key=lambda index: (costs[index], random.random()))
    return [entries[index] for index in order[:PAIR_ENDS]]
