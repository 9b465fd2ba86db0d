"""Depth first through the cached prefixes of waiting requests, the branch with most of them first.

Requests that share a cached prefix run one after the other, so it is used by all of them while it is there, and
prefixes that many wait for go before longer ones that few wait for.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tandem_engine.memory.radix_node import shared_blocks
from tandem_engine.messages.block_hash import TOKEN_BYTES, pack_tokens
from tandem_engine.scheduler.policy.by_prefix import Candidate


class Path(NamedTuple):
    """A candidate and its cached tokens, packed: a way down the tree of all candidates' prefixes."""

    tokens: bytes
    candidate: Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaviestBranchFirst:
    """A `Ranking`. Equals keep the order of the queue."""

    page_size: int

    def __call__(self, candidates: list[Candidate]) -> list[Candidate]:
        by_salt: defaultdict[str, list[Path]] = defaultdict(list)
        for candidate in candidates:
            tokens = pack_tokens(candidate.req.token_ids(0, candidate.cached))
            by_salt[candidate.req.cache_salt].append(Path(tokens, candidate))
        return [path.candidate for paths in _heaviest_first(by_salt.values()) for path in self._depth_first(paths)]

    def _depth_first(self, paths: list[Path]) -> list[Path]:
        """Where `paths` part, their branches; then those that end there."""
        if len(paths) == 1:
            return paths
        block = self.page_size * TOKEN_BYTES
        # What the first and the last in order share, all between them share.
        tokens = [path.tokens for path in paths]
        parting = shared_blocks(min(tokens), max(tokens), block) * block
        branches: defaultdict[bytes, list[Path]] = defaultdict(list)
        for path in paths:
            branches[path.tokens[parting : parting + block]].append(path)
        ending = branches.pop(b"", [])
        below = (path for branch in _heaviest_first(branches.values()) for path in self._depth_first(branch))
        return [*below, *ending]


def _heaviest_first(branches: Iterable[list[Path]]) -> list[list[Path]]:
    return sorted(branches, key=len, reverse=True)
