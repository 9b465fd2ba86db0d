"""What `tandem verify` prints: a table that grows as paths finish, or one JSON object."""

import msgspec

from tandem_engine.config import ModelImpl
from tandem_engine.verify.compare import PathResult


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    model: str
    family: str
    impl: ModelImpl
    """Who computed it on our side."""
    dtype: str
    logprob_bound: float
    """How far a logprob may be from the reference's."""
    torch: str
    transformers: str
    prompts: int
    equal: bool
    """Every path ran, did what it is named after, and equals the reference."""
    not_exercised: int
    """Paths that did not do what they are named after."""
    paths: tuple[PathResult, ...]


def print_head() -> None:
    print(
        f"{'path':<34} {'requests':>8} {'tokens':>7} {'cached':>7} "
        f"{'retracted':>9} {'drafts':>7} {'max Δlogprob':>12} {'s':>6}  result"
    )


def print_row(result: PathResult) -> None:
    print(
        f"{result.path:<34} {result.requests:>8} {result.tokens:>7} {result.cached_tokens:>7} "
        f"{result.retractions:>9} {result.accepted_drafts:>7} "
        f"{result.max_logprob_difference:>12.1e} {result.seconds:>6.1f}  "
        f"{result.result}",
        flush=True,
    )
