"""One step from start to end, on the device.

    resolve ─▶ model forward, attention as planned ─▶ sample ─▶ (agree with other ranks) ─▶ publish, record ─▶ copy
                                                  └─▶ prompt logprobs, sums for embeddings                 to host

The runner keeps nothing between steps but what its parts keep: KV pages, the newest token of each row, and the
token history of rows whose requests need it. Where layers keep states, it has the inputs of runs of drafts until it is
given the number of tokens that are accepted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_engine.executor.interface import HiddenObserver
from tandem_engine.forward.batch import ForwardBatch, ForwardResult, Guesses, drafts_ahead, over_runs, wanted_tokens
from tandem_engine.forward.future_map import FutureMap, token_rows
from tandem_engine.forward.results import sum_pooled
from tandem_engine.kernels.interface import HeadTurn
from tandem_engine.memory.listed_runs import ListedRuns
from tandem_engine.memory.pool import KvPool
from tandem_engine.memory.state_pool import DraftedRuns, StatePool, StepStates
from tandem_engine.model.adapters.step import StepAdapters
from tandem_engine.model.adapters.weights import AdapterWeights
from tandem_engine.model.attention.backend import Attend, AttentionBackend, NotifyingPlan, TurningPlan
from tandem_engine.model.base import DraftHead, LayerInputs, StepModel
from tandem_engine.model.decoder import Decoder
from tandem_engine.model.layers.delta import StatefulAttend, keep_accepted
from tandem_engine.parallel.group import SingleRank, TpGroup, agree_on_step
from tandem_engine.sampling.logprobs import prompt_scores
from tandem_engine.sampling.sampler import SampleOutput, Sampler


def hidden_states(
    model: StepModel,
    observer: HiddenObserver | None,
    batch: ForwardBatch,
    *,
    input_ids: Tensor,
    attend: Attend,
    wanted: Tensor,
    adapters: StepAdapters | None = None,
) -> Tensor:
    """[W, hidden_size] of the tokens `wanted` [W] of `batch`, whose `input_ids` are resolved.

    An `observer` is shown all tokens', which costs the last layer's shortcut.
    """
    if observer is None:
        return _compute(model, batch, input_ids, attend, wanted, adapters)
    every = torch.arange(batch.num_tokens, device=input_ids.device)
    adapters = None if adapters is None else adapters.with_all_wanted()
    hidden = every_hidden_state(
        model, observer, batch, input_ids=input_ids, attend=attend, every=every, adapters=adapters
    )
    return hidden.index_select(0, wanted)


def every_hidden_state(
    model: StepModel,
    observer: HiddenObserver | None,
    batch: ForwardBatch,
    *,
    input_ids: Tensor,
    attend: Attend,
    every: Tensor,
    adapters: StepAdapters | None = None,
) -> Tensor:
    """[T, hidden_size] of all tokens of `batch`, whose indices are `every` [T]; `observer` is shown them."""
    if observer is None or not observer.layers:
        hidden = _compute(model, batch, input_ids, attend, every, adapters)
        if observer is not None:
            observer.observe(hidden, batch.out_cache_loc)
        return hidden
    assert isinstance(model, Decoder), "inputs of layers are those of our own"
    inputs = LayerInputs(layers=observer.layers)
    hidden = model.forward(input_ids, batch.positions, attend, every, adapters, inputs)
    observer.observe(torch.cat(inputs.found, dim=1), batch.out_cache_loc)
    return hidden


def keep_guesses(model: StepModel, batch: ForwardBatch, hidden: Tensor, wanted: Tensor) -> None:
    """Let a head remember what it made of the tokens `wanted` [S], `hidden` [S, hidden_size]."""
    if isinstance(model, DraftHead):
        model.keep(hidden, batch.out_cache_loc.index_select(0, wanted))


def _compute(
    model: StepModel,
    batch: ForwardBatch,
    input_ids: Tensor,
    attend: Attend,
    wanted: Tensor,
    adapters: StepAdapters | None,
) -> Tensor:
    if isinstance(model, DraftHead):
        return model.forward(batch, input_ids, attend, wanted)
    if adapters is None:
        return model.forward(input_ids, batch.positions, attend, wanted)
    return model.forward(input_ids, batch.positions, attend, wanted, adapters)


def with_states(
    attend: Attend, states: StatePool | None, batch: ForwardBatch, listed: ListedRuns | None = None
) -> Attend:
    """`attend` of `batch`, with the `states` of its sequences where layers keep any; `listed`: those of a device."""
    if states is None:
        return attend
    if listed is not None:
        return StatefulAttend(attend, StepStates.of_listed(states), listed)
    return StatefulAttend(attend, StepStates.of(states, batch))


def drafted_runs(attend: Attend) -> DraftedRuns | None:
    """Of the step that ran with `attend`: those whose states are yet to follow; None if there are none."""
    return attend.states.drafted if isinstance(attend, StatefulAttend) else None


Wrote = Callable[[int], None]
"""Called with a layer once its KV is written, or queued to be."""


def notifying(plan: Attend, wrote: Wrote) -> Attend:
    """`plan`, with a callback after each layer. It rotates heads itself if `plan` does."""
    return NotifyingTurningPlan(plan, wrote) if isinstance(plan, TurningPlan) else NotifyingPlan(plan=plan, wrote=wrote)


@dataclass(frozen=True, slots=True)
class NotifyingTurningPlan(TurningPlan):
    """See `notifying`."""

    plan: TurningPlan
    wrote: Wrote

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gathered = self.plan(layer, q, k, v)
        self.wrote(layer)
        return gathered

    def turn_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn) -> Tensor:
        """See `TurningPlan.turn_and_attend`."""
        gathered = self.plan.turn_and_attend(layer, q, k, v, turn)
        self.wrote(layer)
        return gathered


NOTHING_SAMPLED = SampleOutput(token_ids=torch.empty(0, dtype=torch.int64), logprobs=())


class ModelRunner:
    """Computes batches in the order they come. One thread at a time, under `torch.inference_mode`."""

    def __init__(
        self,
        *,
        model: StepModel,
        pool: KvPool,
        backend: AttentionBackend,
        sampler: Sampler,
        future_map: FutureMap,
        observer: HiddenObserver | None = None,
        group: TpGroup | None = None,
        adapters: Sequence[AdapterWeights] = (),
        states: StatePool | None = None,
    ) -> None:
        """Assemble a runner.

        Args:
            observer: is shown the hidden states of all tokens, which costs the last layer's shortcut.
            group: the ranks that share the model, if it is shared.
            adapters: by the slot that batches name them by.
            states: of layers that keep any.
        """
        self.model = model
        self.pool = pool
        self.backend = backend
        self._sampler = sampler
        self._future_map = future_map
        self._observer = observer
        self._group = group or SingleRank()
        self._adapters = adapters
        self._states = states
        self._drafted: DraftedRuns | None = None
        """Of the newest step."""

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Run `batch`: KV is written, sampled tokens are published to their rows and returned."""
        started = time.perf_counter()
        if batch.num_tokens == 0:
            return ForwardResult(step=batch.step, next_token_ids=())
        hidden = self._hidden(batch)
        rows = len(batch.sample_index) + sum(batch.draft_lens)
        scored = len(hidden) - sum(len(pooled.tokens) for pooled in batch.pooled)
        sampled = self._sample(batch, hidden[:rows]) if rows else NOTHING_SAMPLED
        scores = prompt_scores(hidden[rows:scored], batch.prompt_positions, self.model.logits)
        pooled = sum_pooled(hidden[scored:], batch.pooled)
        facts = agree_on_step(self._group, sampled.token_ids, time.perf_counter() - started)
        token_ids, corrupted = _without_marks(facts.token_ids)
        if rows and not batch.draft_lens:
            # With drafts the last token of a sequence is not known, and not read, before the step is settled.
            self._future_map.publish(batch.rows[batch.sample_index], token_ids)
            self._sampler.record(batch.sampling, token_ids)
        return ForwardResult(
            step=batch.step,
            next_token_ids=tuple(token_ids.tolist()),
            logprobs=sampled.logprobs,
            prompt_scores=scores,
            pooled=pooled,
            corrupted=corrupted,
            compute_s=facts.compute_s,
        )

    def guess(self, batches: Sequence[ForwardBatch]) -> Guesses:
        """See `Runner.guess`."""
        results = [self.forward(batch) for batch in batches]
        return Guesses(lambda: results)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Run the model alone: KV is written, nothing is sampled. float32 [R, vocab]."""
        return self.model.logits(self._hidden(batch)[: len(batch.sample_index) + sum(batch.draft_lens)])

    def record(self, batch: ForwardBatch, token_ids: Tensor) -> None:
        """Let requests with a history have the tokens [S, K] they got, −1 behind a shorter run [every-accepted-token].

        `forward` does so itself but for steps with drafts, where it cannot know what is accepted.
        """
        self._sampler.editor.record(batch.sampling.edits, token_ids)

    def accept(self, accept_lens: Sequence[int]) -> None:
        """See `Runner.accept`."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None:
            assert self._states is not None, "runs of drafts change states where there are none"
            lens = accept_lens[-len(drafted.rows) :]
            keep_accepted(self._states, drafted, torch.tensor(lens), longest=max(lens))

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of tokens: sampled after, then predicting wanted prompt tokens, then to be pooled."""
        if batch.page_copies:
            self.pool.copy_pages(batch.page_copies)
        if self._states is not None:
            self._states.copy(batch.state_copies)
        input_ids = self._future_map.resolve(batch.input_ids, token_rows(batch))
        attend: Attend = self.backend.plan(batch)
        if batch.kv_progress is not None:
            attend = notifying(attend, batch.kv_progress.wrote)
        wanted = wanted_tokens(batch)
        adapters = None if batch.adapters is None else StepAdapters(rows=batch.adapters, slots=self._adapters)
        attend = with_states(attend, self._states, batch)
        self._drafted = drafted_runs(attend)
        hidden = hidden_states(
            self.model,
            self._observer,
            batch,
            input_ids=input_ids,
            attend=attend,
            wanted=wanted,
            adapters=adapters,
        )
        keep_guesses(self.model, batch, hidden, wanted)
        return hidden

    def _sample(self, batch: ForwardBatch, hidden: Tensor) -> SampleOutput:
        return self._sampler.sample(self.model.logits(hidden), over_runs(batch), ahead=drafts_ahead(batch))


def _without_marks(token_ids: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Tokens [R] with 0 for those that mean nothing, and where they are. Later steps may be on their way already."""
    if len(token_ids) == 0 or int(token_ids.min()) >= 0:
        return token_ids, ()
    corrupted = token_ids < 0
    return token_ids.masked_fill(corrupted, 0), tuple(corrupted.nonzero().squeeze(1).tolist())
