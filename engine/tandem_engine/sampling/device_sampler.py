"""Sampling on a device, queued from start to end: the order, rules, noise and tokens of `sampler`.

Nothing here reads a value of the device, makes a shape depend on one, or copies a list from the host [no-device-wait].
What the host has comes with the step (`forward.step_inputs`), and masks of grammars when they are filled. Parts that
`sampler` omits because no row needs them are omitted here if the host can tell, else computed for all rows.

    CountedPenalties       counts of penalized tokens. Slots and arithmetic are those of the CPU's, element by element.
                           There a slot lists the tokens that it has seen, so that a step touches only their logits;
                           only the device has their number. Here every logit of a penalized row is read and written,
                           which takes some microseconds of the device's memory
    QueuedEditor           the edits of `logits_processor`, in its order and with its results
    queue_sampled, queue_prompt_scores
                           the numbers of `logprobs`. The most likely tokens come best first, the lower id first among
                           equals. `topk` may find any of equals, so what is ranked is a whole number that no two tokens
                           share: the logprob's bits, in the order of their values, above the complement of the id
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.forward.batch import PromptPositions, PromptScores, SampledLogprobs, SamplingBatch
from tandem_engine.forward.logit_edits import History, LogitEdits, Penalties, TokenSets
from tandem_engine.forward.results import Outcome, nothing
from tandem_engine.forward.step_inputs import StepInputs
from tandem_engine.kernels.interface import by_triton
from tandem_engine.sampling.logits_processor import TokenTails, record_tokens
from tandem_engine.sampling.logprobs import MAX_ROWS
from tandem_engine.sampling.sampler import CORRUPTED, gumbel, queued_thresholds, scale, token_hashes


class CountedPenalties:
    """Counts of C slots over V tokens, 5 bytes for each pair, on one device."""

    def __init__(self) -> None:
        self._counts = torch.empty(0, 0, dtype=torch.int32)
        """[C, V] occurrences in the output."""
        self._in_prompt = torch.empty(0, 0, dtype=torch.bool)
        """[C, V]"""

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Counts in outputs, int32 [C, V], and what prompts have, bool [C, V]."""
        return self._counts, self._in_prompt

    def load(self, history: History, logits: Tensor) -> None:
        """Make its slot know the tokens of `history`, tensors on the device of `logits` [S, V], and no others."""
        slot, outputs, prompt = history.slot, history.output_ids, history.prompt_ids
        assert slot is not None, "a history without a slot has no counts"
        assert isinstance(outputs, Tensor), "histories come to a device as tensors"
        assert isinstance(prompt, Tensor), "histories come to a device as tensors"
        if slot >= len(self._counts):
            self._grow(slot + 1, logits)
        self._counts[slot].zero_()
        self._counts[slot].index_put_((outputs,), torch.ones_like(outputs, dtype=torch.int32), accumulate=True)
        self._in_prompt[slot].zero_()
        self._in_prompt[slot].index_fill_(0, prompt, value=True)

    def record(self, slots: Tensor, token_ids: Tensor) -> None:
        """See `PenaltyRows.record`."""
        every = slots[:, None].expand_as(token_ids)
        self._counts.index_put_((every, token_ids.clamp(min=0)), (token_ids >= 0).int(), accumulate=True)

    def apply(self, logits: Tensor, penalties: Penalties, ahead: Tensor | None = None) -> None:
        """See `PenaltyRows.apply`."""
        counts = self._counts[penalties.slots]
        if ahead is not None:
            drafts = ahead[penalties.index]
            counts.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).int())
        generated = counts > 0
        known = generated | self._in_prompt[penalties.slots]
        before, strength = logits[penalties.index], penalties.repetition[:, None]
        after = torch.where(known, torch.where(before > 0, before / strength, before * strength), before)
        after -= penalties.frequency[:, None] * counts
        after -= penalties.presence[:, None] * generated
        logits.index_copy_(0, penalties.index, after)

    def _grow(self, slots: int, logits: Tensor) -> None:
        capacity, vocab_size = max(slots, 2 * len(self._counts)), logits.shape[1]
        counts = torch.zeros(capacity, vocab_size, dtype=torch.int32, device=logits.device)
        in_prompt = torch.zeros(capacity, vocab_size, dtype=torch.bool, device=logits.device)
        if len(self._counts):
            counts[: len(self._counts)] = self._counts
            in_prompt[: len(self._in_prompt)] = self._in_prompt
        self._counts, self._in_prompt = counts, in_prompt


WORD_BITS = 32
_NO_EDITS = LogitEdits()


class QueuedEditor:
    """Edits logits on a device. Owns the token history of its penalized rows."""

    def __init__(self) -> None:
        self.penalties = CountedPenalties()
        self.tails = TokenTails()

    def edit(
        self,
        logits: Tensor,
        edits: LogitEdits | None,
        suppressed: TokenSets | None,
        *,
        masks: tuple[Tensor, Tensor] | None = None,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """As `LogitEditor.edit`. `masks`: rows [G] and packed bits [G, words] int32 of the rows with a grammar."""
        if edits is None and suppressed is None and masks is None:
            return logits
        edits = edits or _NO_EDITS
        self._load(edits, logits)
        logits = self._edit_rows(logits, edits, masks, ahead)
        if edits.biases is not None:
            # A bias does not lift what is not allowed: behind that it does what it does before.
            logits.index_put_((edits.biases.index, edits.biases.token_ids), edits.biases.values, accumulate=True)
        unedited = logits if edits.allowed is None else logits.clone()
        _forbid(logits, edits.forbidden)
        if edits.bad_words is not None:
            self.tails.forbid(logits, edits.bad_words, ahead)
        _forbid(logits, suppressed)
        return logits if edits.allowed is None else _restore_if_empty(logits, unedited, edits.allowed)

    def _edit_rows(
        self, logits: Tensor, edits: LogitEdits, masks: tuple[Tensor, Tensor] | None, ahead: Tensor | None
    ) -> Tensor:
        """A copy, with what touches whole rows: penalties, grammars, allowed tokens."""
        if by_triton(logits.device):
            from tandem_engine.sampling.triton_sampler import edit_rows, penalties_by_row

            counted = (
                None
                if edits.penalties is None
                else penalties_by_row(edits.penalties, *self.penalties.tables, logits, ahead)
            )
            return edit_rows(logits, penalties=counted, masks=masks, allowed=edits.allowed)
        logits = logits.clone()
        if edits.penalties is not None:
            self.penalties.apply(logits, edits.penalties, ahead)
        if masks is not None:
            _apply_masks(logits, *masks)
        return logits if edits.allowed is None else _keep_only(logits, edits.allowed)

    def record(self, edits: LogitEdits | None, token_ids: Tensor) -> None:
        """Remember the tokens that rows of the step got; see `record_tokens`."""
        record_tokens(self.penalties, self.tails, edits, token_ids)

    def _load(self, edits: LogitEdits, logits: Tensor) -> None:
        for history in edits.histories:
            if history.slot is not None:
                self.penalties.load(history, logits)
            self.tails.load(history.row, history.output_ids, device=logits.device)


def _apply_masks(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """−inf wherever the mask of a row forbids the token, and for tokens beyond its words."""
    vocab_size = logits.shape[1]
    bits = bitmask[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = (bits & 1).bool().flatten(1)[:, :vocab_size]
    edited = torch.full_like(logits[: len(rows)], -torch.inf)
    known = allowed.shape[1]
    edited[:, :known] = logits[rows, :known].masked_fill(~allowed, -torch.inf)
    logits.index_copy_(0, rows, edited)


def _keep_only(logits: Tensor, allowed: TokenSets) -> Tensor:
    free = torch.ones_like(logits, dtype=torch.bool)
    free.index_fill_(0, allowed.index, value=False)
    free.index_put_((allowed.index, allowed.token_ids), torch.ones_like(allowed.index, dtype=torch.bool))
    return logits.masked_fill(~free, -torch.inf)


def _restore_if_empty(logits: Tensor, before: Tensor, allowed: TokenSets) -> Tensor:
    """Rows with `allowed` tokens that later rules have emptied, as they were `before` those."""
    limited = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    limited.index_fill_(0, allowed.index, value=True)
    empty = limited & (logits.amax(dim=1) == -torch.inf)
    return torch.where(empty[:, None], before, logits)


def _forbid(logits: Tensor, tokens: TokenSets | None) -> None:
    if tokens is not None:
        logits.index_put_((tokens.index, tokens.token_ids), logits.new_full((), -torch.inf))


ID_BITS = 32
ALL_IDS = (1 << ID_BITS) - 1
BELOW_SIGN = 0x7FFFFFFF


def queue_sampled(
    logits: Tensor, token_ids: Tensor, wanted: tuple[int, ...], named: Tensor | None = None
) -> Outcome[tuple[SampledLogprobs | None, ...]]:
    """As `sampled_logprobs`, for all rows of `logits` [S, V] at once; `wanted` by row, −1 for none; `named` [R, K]
    on their device."""
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    values, ids = most_likely(logprobs, max(wanted))
    if named is None:
        named = token_ids.new_empty((len(token_ids), 0))
    asked = logprobs.gather(1, named.clamp(min=0))

    def read(tensors: Sequence[Tensor]) -> tuple[SampledLogprobs | None, ...]:
        rows = zip(wanted, *(tensor.tolist() for tensor in tensors), strict=True)
        return tuple(
            None
            if count < 0
            else SampledLogprobs(logprob=logprob, top=_named(named, asked) or _top(ids, values, count))
            for count, logprob, values, ids, named, asked in rows
        )

    return Outcome((chosen, values, ids, named, asked), read)


def queue_prompt_scores(
    hidden: Tensor, wanted: Sequence[PromptPositions], project: Callable[[Tensor], Tensor]
) -> Outcome[tuple[PromptScores, ...]]:
    """As `prompt_scores`."""
    parts = torch.split(hidden, [len(positions.tokens) for positions in wanted]) if wanted else ()
    tensors = [
        tensor for positions, rows in zip(wanted, parts, strict=True) for tensor in _score(rows, positions, project)
    ]

    def read(copies: Sequence[Tensor]) -> tuple[PromptScores, ...]:
        return tuple(
            PromptScores(
                sequence=positions.sequence,
                first=positions.first,
                logprobs=_read_scores(copies[4 * index : 4 * index + 4], positions.top),
            )
            for index, positions in enumerate(wanted)
        )

    return Outcome(tuple(tensors), read)


def most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of [S, V] float32, in order: values and ids [S, count], or as many as there are."""
    # Both zeros are one value, with one pattern of bits.
    bits = (logprobs + 0.0).view(torch.int32)
    in_order = bits ^ ((bits >> 31) & BELOW_SIGN)
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    ranks = (in_order.long() << ID_BITS) | (ALL_IDS - ids)
    best = ALL_IDS - (ranks.topk(min(max(count, 0), logprobs.shape[1]), dim=1).values & ALL_IDS)
    return logprobs.gather(1, best), best


def _score(hidden: Tensor, positions: PromptPositions, project: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """[N] logprob and rank of each token, [N, top] the most likely and their ids; a part of the logits at a time."""
    parts = []
    for rows, token_ids in zip(torch.split(hidden, MAX_ROWS), torch.split(positions.token_ids, MAX_ROWS), strict=True):
        logprobs = project(rows).log_softmax(dim=1)
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > chosen).sum(dim=1) + 1
        parts.append((chosen.squeeze(1), ranks, *most_likely(logprobs, positions.top)))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _read_scores(tensors: Sequence[Tensor], count: int) -> tuple[SampledLogprobs, ...]:
    rows = zip(*(tensor.tolist() for tensor in tensors), strict=True)
    return tuple(
        SampledLogprobs(logprob=logprob, top=_top(ids, values, count), rank=rank) for logprob, rank, values, ids in rows
    )


def _named(ids: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """() for a row that names no tokens."""
    return tuple((token, value) for token, value in zip(ids, values, strict=True) if token >= 0)


def _top(ids: Sequence[int], values: Sequence[float], count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[:count], values[:count], strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedSample:
    """R rows in the order of the logits."""

    token_ids: Tensor
    """[R] int64; `CORRUPTED` where the best logit is NaN or +infinity."""
    logprobs: Outcome[tuple[SampledLogprobs | None, ...]]
    """[R], or empty when no row requests them."""


class QueuedSampler:
    """Samples one token per row on a device."""

    def __init__(self) -> None:
        self._hashes = torch.empty(0, dtype=torch.int32)
        self.editor = QueuedEditor()

    def sample(self, logits: Tensor, inputs: StepInputs, masks: tuple[Tensor, Tensor] | None = None) -> QueuedSample:
        """logits [R, V] float32, left as they are. `inputs` on their device; `masks` as in `QueuedEditor.edit`."""
        sampling = inputs.sampling
        edited = self.editor.edit(logits, sampling.edits, inputs.suppressed, masks=masks, ahead=inputs.ahead)
        make = _choose_by_kernels if by_triton(logits.device) else self._choose
        token_ids = make(edited, sampling, filtered=inputs.filtered)
        logprobs: Outcome[tuple[SampledLogprobs | None, ...]] = nothing(())
        if sampling.logprobs:
            logprobs = queue_sampled(logits, token_ids.clamp(min=0), sampling.logprobs, sampling.logprob_ids)
        return QueuedSample(token_ids=token_ids, logprobs=logprobs)

    def record(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """See `LogitEditor.record`."""
        self.editor.record(inputs.recorded, token_ids)

    def _choose(self, logits: Tensor, sampling: SamplingBatch, *, filtered: bool) -> Tensor:
        best, token_ids = logits.max(dim=1)
        if not sampling.all_greedy:
            drawn = self._draw(logits, sampling, filtered=filtered)
            token_ids = torch.where(sampling.temperature > 0.0, drawn, token_ids)
        return token_ids.where(best < torch.inf, CORRUPTED)

    def _draw(self, logits: Tensor, sampling: SamplingBatch, *, filtered: bool) -> Tensor:
        """[R] by the Gumbel-max rule over what the filters keep. What greedy rows get here means nothing."""
        scaled = scale(logits, sampling.temperature.where(sampling.temperature > 0.0, 1.0))
        if filtered:
            thresholds = queued_thresholds(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
            scaled = scaled.masked_fill(scaled < thresholds[:, None], -torch.inf)
        noise = gumbel(sampling.seed, sampling.position, self._vocabulary(logits))
        return (noise + scaled).argmax(dim=1)

    def _vocabulary(self, logits: Tensor) -> Tensor:
        if len(self._hashes) != logits.shape[1] or self._hashes.device != logits.device:
            self._hashes = token_hashes(torch.arange(logits.shape[1], device=logits.device))
        return self._hashes


def _choose_by_kernels(logits: Tensor, sampling: SamplingBatch, *, filtered: bool) -> Tensor:  # noqa: ARG001
    """The same by Triton, which needs no sort and tells rows with filters by itself."""
    from tandem_engine.sampling.triton_sampler import sample_rows

    return sample_rows(logits, sampling)
