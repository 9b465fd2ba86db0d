"""Fills the masks of a step, once everything before it has settled.

Each request's matcher has then seen all its tokens. A request that has ended, or ends here because its grammar has,
keeps masks that forbid nothing: its tokens will be dropped.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from tandem_engine.errors import InvalidRequestError
from tandem_engine.forward.token_masks import ALL_ALLOWED, TokenMasks
from tandem_engine.messages.outputs import Finish
from tandem_engine.sampling.grammar.backend import Bits
from tandem_engine.sampling.grammar.draft_run import masks_for_run
from tandem_engine.scheduler.endings import error_finish
from tandem_engine.scheduler.grammar_progress import GRAMMAR_ENDED, GrammarProgress
from tandem_engine.scheduler.request import Request


def open_masks(samplers: Sequence[Request], constrained: Sequence[int], draft_lens: Sequence[int]) -> TokenMasks | None:
    """Masks for the samplers at `constrained`, those with a grammar or a budget; None for nobody.

    Each has one for every row of sampling that is its own: one more than it has drafts. `draft_lens` are those of all
    samplers, () when nobody drafts.
    """
    if not constrained:
        return None
    words = max(_progress(samplers[index]).compiled.words for index in constrained)
    if not draft_lens:
        return TokenMasks.open(tuple(constrained), words)
    starts = [*accumulate((drafts + 1 for drafts in draft_lens), initial=0)]
    rows = tuple(row for index in constrained for row in range(starts[index], starts[index + 1]))
    return TokenMasks.open(rows, words)


def fill_masks(masks: TokenMasks, runs: Iterable[tuple[Request, Sequence[int]]]) -> None:
    """Fill and release the masks of a step that is the only one in flight, or about to be launched.

    `runs` are its samplers with their drafts. Those that cannot go on get a wish, which settlement of this step obeys
    before it looks at their tokens.
    """
    bits: Bits = masks.bitmask.numpy()
    start = 0
    for req, drafts in runs:
        if not req.sampling.masked:
            continue
        stop = start + 1 + len(drafts)
        if req.finished is None and req.to_finish is None:
            req.to_finish = _fill(req, drafts, bits[start:stop])
        start = stop
    assert start == len(bits), f"{start} masks filled of {len(bits)}"
    masks.release()


def _progress(req: Request) -> GrammarProgress:
    assert req.grammar is not None, f"request {req.rid} samples without its grammar"
    return req.grammar


def _fill(req: Request, drafts: Sequence[int], bits: Bits) -> Finish | None:
    """The masks of the next tokens of `req`, or how it ends."""
    grammar = _progress(req)
    try:
        grammar.catch_up(req.output_ids)
    except InvalidRequestError as error:
        return error_finish(error)
    if grammar.matcher.ended:
        return GRAMMAR_ENDED
    known = grammar.compiled.words
    written = masks_for_run(grammar.matcher, drafts, bits[:, :known])
    bits[:written, known:] = 0
    problem = grammar.matcher.problem
    if written and not grammar.matcher.ended:
        bits[written:] = ALL_ALLOWED
        if problem is not None:
            # A guess ran into it. The output may never go there.
            grammar.start_over(req.output_ids)
        return None
    bits[:] = ALL_ALLOWED
    if problem is None:
        return GRAMMAR_ENDED
    return error_finish(grammar.not_followed())
