"""Warm-up: runs the steps that launch every kernel a request can need, so that none is compiled while serving.

What Triton compiles follows from the types, the alignment and some values of a launch's arguments. The code that queues
a step determines those, so this is a list of steps, not of kernels: each takes the path of a request's step.

    of a model       a prompt, a decode, each by a graph and without; greedy and sampled; more rows than one list holds
    of a request     edits of whole rows of logits in each combination; of single logits; logprobs; copied pages
                     (page digests and copies to the host are not part of a step: `disaggregation.digest` and
                     `executor.cuda.streams` warm their own)

Steps write to pages that the caller has reserved, to the row of padding, and to the first slot of penalties, which a
request loads again before it uses it. Their results are dropped.

A new kernel, or a new kind of argument of one, needs a step here that launches it. Tests compare what requests of every
kind launch with what these steps launch.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tandem_engine.base.names import DUMMY_PAGE, PADDING_ROW, PageId
from tandem_engine.executor.self_test import single_sequence_batch
from tandem_engine.forward.batch import ForwardBatch, ForwardMode, PromptPositions, SamplingBatch, TokenMasks
from tandem_engine.forward.logit_edits import BadWords, History, LogitEdits, Penalties, TokenBiases, TokenSets
from tandem_engine.forward.results import PooledTokens
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.memory.window_pages import WindowPages

LISTED_ROWS = 1024
"""Rows that one kernel lists the work of (`kernels.triton.work_list.MIN_WIDTH`); each doubling takes another."""

MASK_BITS = 32
"""Tokens of a word of a grammar's mask."""

ROW, TOKEN = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
"""The only row of logits, and a token that every vocabulary has."""


@dataclass(frozen=True, slots=True)
class WarmStep:
    """A step of no request."""

    name: str
    batch: ForwardBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Where steps may write, and limits of the engine."""

    pages: Sequence[PageId]
    """At least one; no request has them."""
    page_size: int
    prompt_tokens: int
    """As many as fit the pages."""
    max_rows: int
    """Largest number of sequences in a step."""
    windows: Sequence[WindowPages] = ()
    """Which have pages for all of `pages`."""

    def step(self, extend_len: int, *, every_token: bool = False) -> ForwardBatch:
        """The last `extend_len` tokens of a prompt."""
        tokens = torch.zeros(self.prompt_tokens, dtype=torch.int64)
        return single_sequence_batch(
            tokens,
            self.pages,
            self.page_size,
            extend_len=extend_len,
            every_token=every_token,
            windows=self.windows,
        )

    def prompt(self) -> ForwardBatch:
        return self.step(self.prompt_tokens)

    def decode(self) -> ForwardBatch:
        return self.step(1)


def model_steps(room: Room) -> Iterator[WarmStep]:
    """What any model launches, a draft model or head included."""
    for greedy in (True, False):
        how = "greedy" if greedy else "sampled"
        sampling = greedy_row() if greedy else filtered_row()
        for name, batch in (("a prompt", room.prompt()), ("a decode", room.decode())):
            step = replace(batch, sampling=sampling)
            yield WarmStep(f"{name}, {how}", step)
            yield WarmStep(f"{name} without a graph, {how}", replace(step, eager=True))
    for rows in list_sizes(room.max_rows):
        yield WarmStep(f"{rows} decodes", padding(rows))


def request_steps(room: Room, *, vocab_size: int, drafts: int) -> Iterator[WarmStep]:
    """What parameters of requests add to that. `drafts`: most drafts of one run; 0 without speculation."""
    yield from _edited(room, vocab_size)
    yield WarmStep("biases, bad words and logprobs", replace(room.decode(), sampling=_single_logits()))
    yield WarmStep("prompt logprobs and an embedding", _scored(room.prompt()))
    if not room.windows:  # nothing copies pages where layers have different ones
        yield WarmStep("copied pages", replace(room.decode(), page_copies=((DUMMY_PAGE, room.pages[0]),)))
    run = min(drafts + 1, room.prompt_tokens)
    if run > 1:
        yield from _verified(room, run)


def list_sizes(max_rows: int) -> Iterator[int]:
    """Numbers of rows up to `max_rows`, one for each further size of list."""
    most = LISTED_ROWS
    while most < max_rows:
        most *= 2
        yield min(most, max_rows)


def padding(rows: int) -> ForwardBatch:
    """So many decodes of the dummy page's first token, of which one is sampled."""
    nothing, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
    return ForwardBatch(
        step=0,
        mode=ForwardMode.DECODE,
        input_ids=nothing,
        positions=nothing,
        out_cache_loc=nothing,
        rows=torch.full((rows,), PADDING_ROW),
        seq_lens=ones,
        extend_lens=ones,
        page_table=torch.full((rows, 1), DUMMY_PAGE, dtype=torch.int32),
        num_extend=0,
        sample_index=ROW,
        sampling=greedy_row(),
    )


def greedy_row() -> SamplingBatch:
    return replace(filtered_row(), temperature=torch.zeros(1), all_greedy=True)


def filtered_row(rows: int = 1) -> SamplingBatch:
    """Sampled, with every filter on."""
    return SamplingBatch(
        temperature=torch.ones(rows),
        top_k=torch.full((rows,), 2),
        top_p=torch.full((rows,), 0.9),
        min_p=torch.full((rows,), 0.01),
        seed=torch.zeros(rows, dtype=torch.int64),
        position=torch.ones(rows, dtype=torch.int64),
    )


def _edited(room: Room, vocab_size: int) -> Iterator[WarmStep]:
    """Penalties, a grammar's mask and allowed tokens, in each combination; every second one greedy."""
    for number, (penalized, masked, limited) in enumerate(product((False, True), repeat=3)):
        edits = LogitEdits(
            biases=None if penalized or masked or limited else _bias(),
            penalties=_penalties() if penalized else None,
            allowed=TokenSets(index=ROW, token_ids=TOKEN) if limited else None,
            histories=(_history(slot=0),) if penalized else (),
        )
        names = [
            name
            for name, wanted in (("penalties", penalized), ("a grammar", masked), ("allowed tokens", limited))
            if wanted
        ]
        sampling = greedy_row() if number % 2 else filtered_row()
        masks = _released(vocab_size) if masked else None
        yield WarmStep(
            ", ".join(names) or "a bias", replace(room.decode(), sampling=replace(sampling, edits=edits, masks=masks))
        )


def _verified(room: Room, run: int) -> Iterator[WarmStep]:
    """A run of drafts, plain and with penalties, which count the drafts before a row."""
    verified = replace(room.step(run, every_token=True), mode=ForwardMode.TARGET_VERIFY, draft_lens=(run - 1,))
    yield WarmStep("drafts", replace(verified, sampling=filtered_row(run)))
    edits = LogitEdits(penalties=_penalties(), histories=(_history(slot=0),))
    yield WarmStep("drafts and penalties", replace(verified, sampling=replace(filtered_row(run), edits=edits)))


def _single_logits() -> SamplingBatch:
    edits = LogitEdits(
        biases=_bias(),
        forbidden=TokenSets(index=ROW, token_ids=TOKEN),
        bad_words=BadWords(
            index=ROW,
            rows=torch.full((1,), PADDING_ROW),
            prefixes=TOKEN[:, None],
            last=TOKEN,
            recalled_index=ROW,
            recalled_rows=torch.full((1,), PADDING_ROW),
        ),
        histories=(_history(slot=None),),
    )
    return replace(filtered_row(), edits=edits, suppress=((0,),), logprobs=(1,), logprob_ids=TOKEN[:, None])


def _scored(prompt: ForwardBatch) -> ForwardBatch:
    """With logprobs of its tokens, and with the sum of what an embedding is made of."""
    tokens = torch.arange(prompt.num_tokens)
    scores = PromptPositions(sequence=0, first=1, tokens=tokens, token_ids=torch.zeros_like(tokens), top=1)
    pooled = PooledTokens(sequence=0, first=0, tokens=tokens)
    return replace(prompt, sampling=greedy_row(), prompt_positions=(scores,), pooled=(pooled,))


def _penalties() -> Penalties:
    strength = torch.ones(1)
    return Penalties(index=ROW, slots=torch.zeros_like(ROW), repetition=strength, frequency=strength, presence=strength)


def _bias() -> TokenBiases:
    return TokenBiases(index=ROW, token_ids=TOKEN, values=torch.ones(1))


def _history(*, slot: int | None) -> History:
    return History(row=PADDING_ROW, slot=slot, prompt_ids=(0,), output_ids=(0,))


def _released(vocab_size: int) -> TokenMasks:
    masks = TokenMasks.open((0,), -(-vocab_size // MASK_BITS))
    masks.release()
    return masks


logger = logging.getLogger(__name__)

NOTABLE_S = 1.0
"""A step that takes longer is logged in a separate line, so that a start which compiles shows progress."""


@torch.inference_mode()
def warm_up(run: Callable[[ForwardBatch], object], steps: Iterable[WarmStep], *, of: str) -> None:
    """`run` each of `steps` and wait for it; `of`: whose they are, for the log."""
    for step in steps:
        began, before = time.perf_counter(), COMPILED.counts.starting
        run(step.batch)
        seconds, compiled = time.perf_counter() - began, COMPILED.counts.starting - before
        logger.log(
            logging.INFO if seconds >= NOTABLE_S else logging.DEBUG,
            "warming up %s: %s: %d kernels in %.1f s",
            of,
            step.name,
            compiled,
            seconds,
        )
