"""Runs of the model that belong to no request, on pages that are reserved for them, while nothing else computes."""

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import torch

from tandem_engine.base.errors import BusyError
from tandem_engine.base.names import PageId
from tandem_engine.engine.assembly import EngineParts
from tandem_engine.executor.self_test import SelfTestReport, logits_of, self_test, single_sequence_batch
from tandem_engine.executor.warm_up import Room, model_steps, request_steps, warm_up
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.kernels.interface import by_triton

logger = logging.getLogger(__name__)
SELF_TEST_TOKENS = 256

WARM_UP_TOKENS = 32
"""Of its prompt: more than a run of drafts has. Which kernels are launched does not depend on the number."""


def run_self_test(parts: EngineParts, *, vocab_size: int) -> SelfTestReport:
    """Compute on random tokens, on every rank. Raises `EngineError`.

    Its rates stand in for measured ones: a worker that reported no step time would look free to routers, whatever
    they give it.
    """
    memory, scheduler = parts.memory, parts.scheduler
    tokens = min(SELF_TEST_TOKENS, scheduler.max_request_tokens - 1)
    pages = memory.reserve_pages(min(memory.pages_for(tokens + 1), memory.reservable_pages()))
    if not pages:
        raise BusyError("no KV page is free for a self-test: try again, or pause with mode retract before")
    test = partial(
        self_test,
        parts.runner,
        pages=pages,
        page_size=memory.page_size,
        vocab_size=vocab_size,
        windows=memory.windows,
        prompt_tokens=tokens,
    )
    try:
        report = parts.executor.run(lambda: parts.joint.run(test))
    finally:
        memory.give_back(pages)
    scheduler.tally.expect(report.prefill_tokens_per_s, report.decode_step_s)
    return report


def run_warm_up(parts: EngineParts, *, vocab_size: int, max_rows: int, drafts: int) -> None:
    """Launch whatever a request can, on every rank, so that none waits for a compiler. On a CPU there is nothing to do.

    See `executor.warm_up`; `max_rows` is the largest number of sequences in a step.
    """
    if not by_triton(parts.pool.data.device):
        return
    memory, began = parts.memory, time.perf_counter()
    tokens = min(WARM_UP_TOKENS, parts.scheduler.max_request_tokens - 1)
    pages = memory.reserve_pages(min(memory.pages_for(tokens), memory.reservable_pages()))
    if not pages:
        raise BusyError("no KV page is free to warm up with")
    room = Room(
        pages=pages,
        page_size=memory.page_size,
        prompt_tokens=min(tokens, len(pages) * memory.page_size),
        max_rows=max_rows,
        windows=memory.windows,
    )

    logger.info("warming up: launching every kernel that a request can")
    try:
        steps = chain(model_steps(room), request_steps(room, vocab_size=vocab_size, drafts=drafts))
        warm_up(lambda batch: parts.executor.launch(batch).result(), steps, of="the model")
        if parts.draft_runner is not None:
            guess = parts.draft_runner.forward
            run = parts.executor.run
            warm_up(lambda batch: run(lambda: parts.joint.run(lambda: guess(batch))), model_steps(room), of="the draft")
    finally:
        memory.give_back(pages)
    logger.info(
        "warmed up in %.1f s; %d kernels were compiled or read from Triton's cache since the start",
        time.perf_counter() - began,
        COMPILED.counts.starting,
    )


def forced_logits(parts: EngineParts, tokens: Sequence[int], *, chunk: int) -> Iterator[torch.Tensor]:
    """Logits after each of `tokens`, given those before it: float32 [n, vocab], `chunk` at a time.

    Nothing else may compute at that time. Of one rank: logits of a rank are those of its part of the vocabulary.

    Raises:
        BusyError: too few pages are free.
    """
    memory, text = parts.memory, torch.tensor(tokens)
    pages: list[PageId] = []
    try:
        for begin in range(0, len(tokens), chunk):
            so_far = text[: begin + chunk]
            more = memory.reserve_pages(memory.pages_for(len(so_far)) - len(pages))
            if more is None:
                raise BusyError(f"{len(tokens)} tokens need more KV pages than are free")
            pages += more
            new, windows = len(so_far) - begin, memory.windows
            batch = single_sequence_batch(
                so_far, pages, memory.page_size, extend_len=new, every_token=True, windows=windows
            )
            yield parts.executor.run(partial(logits_of, parts.runner, batch))
            for window in windows:
                window.drop(pages[: window.passed_blocks(len(so_far))])
    finally:
        memory.give_back(pages)
