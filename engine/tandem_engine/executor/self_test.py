"""Self-test at start: does this model compute, and how fast? It runs once, before the engine serves.

    1. kernels are compiled
    2. a random prompt runs on pages that the caller passes; its logits must be finite and not all the same
       (a checkpoint of NaN, infinities or zeros loads well and serves garbage)
    3. the same prompt is timed, then a decode step of its last token

The test leaves no trace: the pages get their bytes back, no row is published, nothing is sampled.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError
from tandem_engine.base.names import PADDING_ROW, PageId
from tandem_engine.executor.interface import Runner
from tandem_engine.forward.batch import ForwardBatch, ForwardMode, SamplingBatch
from tandem_engine.memory.window_pages import WindowPages


def single_sequence_batch(
    tokens: Tensor,
    pages: Sequence[PageId],
    page_size: int,
    *,
    extend_len: int,
    every_token: bool = False,
    windows: Sequence[WindowPages] = (),
) -> ForwardBatch:
    """The last `extend_len` of `tokens` [N] as one sequence on `pages`, whose KV of the others is there.

    `every_token`: with logits after each of them, as if all but the first were drafts; else after the last.
    `windows`: which have pages for all of `pages`.
    """
    length = len(tokens)
    positions = torch.arange(length - extend_len, length)
    page_table = torch.tensor([list(pages)], dtype=torch.int32)
    slots = page_table[0, positions // page_size].long() * page_size + positions % page_size
    is_decode = extend_len == 1
    return ForwardBatch(
        step=0,
        mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        input_ids=tokens[-extend_len:],
        positions=positions,
        out_cache_loc=slots,
        rows=torch.tensor([PADDING_ROW]),
        seq_lens=torch.tensor([length]),
        extend_lens=torch.tensor([extend_len]),
        page_table=page_table,
        windows=tuple(window.located(page_table.numpy(), slots.numpy()) for window in windows),
        num_extend=0 if is_decode else 1,
        sample_index=torch.tensor([0]),
        sampling=_no_sampling(),
        draft_lens=(extend_len - 1,) if every_token and not is_decode else (),
    )


@torch.inference_mode()
def logits_of(runner: Runner, batch: ForwardBatch) -> Tensor:
    """See `Runner.logits`; for callers outside the executor."""
    return runner.logits(batch)


def _no_sampling() -> SamplingBatch:
    empty, none = torch.empty(0), torch.empty(0, dtype=torch.int64)
    return SamplingBatch(
        temperature=empty, top_k=none, top_p=empty, min_p=empty, seed=none, position=none, all_greedy=True
    )


PROMPT_TOKENS = 256

REPEATS = 2
"""The best of so many is reported; the run that checks the logits has warmed caches before."""

MIN_SHARE = 0.25
"""Of the prompt's time that is put down to its tokens, however little longer than a decode step it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTestReport:
    """What a router may expect of this engine until it has measured requests."""

    prompt_tokens: int
    prefill_tokens_per_s: float
    """Of further tokens in a step: what any step takes is not counted."""
    decode_step_s: float
    """One sequence alone, after `prompt_tokens`."""


@torch.inference_mode()
def self_test(
    runner: Runner,
    *,
    pages: Sequence[PageId],
    page_size: int,
    vocab_size: int,
    windows: Sequence[WindowPages] = (),
    prompt_tokens: int = PROMPT_TOKENS,
) -> SelfTestReport:
    """Run on `pages`, at least one, which nothing else uses during the test.

    Args:
        prompt_tokens: upper bound; no more are run than fit the pages.

    Raises:
        CheckpointError: the logits are not those of a working model.
    """
    assert pages, "a self-test needs a page"
    length = min(prompt_tokens, len(pages) * page_size)
    prompt = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    extend = single_sequence_batch(prompt, pages, page_size, extend_len=length, windows=windows)
    decode = single_sequence_batch(prompt, pages, page_size, extend_len=1, windows=windows)
    runner.backend.warm_up()
    # Pages of a window have other numbers, and what is free there means nothing.
    kept = [] if windows else pages
    before = [runner.pool.page_view(page).clone() for page in kept]
    try:
        check_logits(runner.logits(extend))
        prefill_s = _best_time(runner, extend)
        decode_s = _best_time(runner, decode)
    finally:
        for page, values in zip(kept, before, strict=True):
            runner.pool.page_view(page).copy_(values)
    computing = max(prefill_s - decode_s, MIN_SHARE * prefill_s)
    return SelfTestReport(prompt_tokens=length, prefill_tokens_per_s=length / computing, decode_step_s=decode_s)


def check_logits(logits: Tensor) -> None:
    """Raise `CheckpointError` for logits [S, V] that no working model gives."""
    if not bool(logits.isfinite().all()):
        raise CheckpointError("the model computes NaN or infinite logits: its weights are damaged")
    if bool((logits == logits[:, :1]).all()):
        raise CheckpointError("the model gives every token the same logit: its weights are zero or damaged")


def _best_time(runner: Runner, batch: ForwardBatch) -> float:
    """Seconds of the fastest of `REPEATS` runs."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        runner.logits(batch)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
