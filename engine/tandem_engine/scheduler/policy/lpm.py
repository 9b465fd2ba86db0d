"""Longest prefix match: who has most tokens in the cache goes first, before they are evicted."""

from tandem_engine.scheduler.policy.by_prefix import Candidate


def longest_prefix_first(candidates: list[Candidate]) -> list[Candidate]:
    """Equals keep the order of the queue."""
    return sorted(candidates, key=lambda candidate: -candidate.cached)
