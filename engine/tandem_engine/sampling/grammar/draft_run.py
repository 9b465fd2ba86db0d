"""Masks for a run of drafted tokens: what may stand at each of its positions.

Verification samples after each draft, as if there were none. Position i has the mask that follows the first i drafts,
so the matcher goes along the run and comes back: only settlement lets it follow tokens for good.
"""

from collections.abc import Sequence

from tandem_engine.sampling.grammar.backend import Bits, Matcher


def masks_for_run(matcher: Matcher, draft_tokens: Sequence[int], bits: Bits) -> int:
    """Write the masks of a run behind what `matcher` has accepted.

    Args:
        matcher: is left as it was, unless it comes back with a `problem`: then it is of no use any more.
        draft_tokens: k drafts.
        bits: [k + 1, words], row i for the token after the first i drafts.

    Returns:
        How many rows were written. The drafts behind them cannot be accepted: the one before does not fit, or ended
        the output, or led to a problem. Rows from there on are left alone; a verifier goes by positions and never by
        what a row looks like [mask-per-row]. 0 when the problem is with the first position, where no draft is involved.
    """
    matcher.fill(bits[0])
    accepted = 0
    for token in draft_tokens:
        if matcher.problem is not None or matcher.ended or not matcher.accept((token,)):
            break
        accepted += 1
        if not matcher.ended:
            matcher.fill(bits[accepted])
    written = accepted + (matcher.problem is None and not (accepted and matcher.ended))
    if matcher.problem is None:
        matcher.rollback(accepted)
    return written
