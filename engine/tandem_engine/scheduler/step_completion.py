"""Applies the results of a step: the only place where tokens reach requests.

For each request of a settled step, in this order
    1. counters   one step less in flight
    2. ended      a request that finished in the meantime is skipped, its result included [ended-is-skipped]
    3. commit     the KV of the step is final, except for drafts: accepted ones follow with 6
    4. finish     an abort that came after the launch takes effect before the token is read [abort-before-token]
    5. chunk      whole pages enter the prefix cache; stages may send them
    6. token      appended up to the first stop or the end of its grammar, streamed; a stop releases the request
    7. handoff    a stage may keep a request whose prompt is done

In overlap mode the next step is in flight, perhaps with a request that ends here: rule 2 drops its surplus token when
that step settles, and pages that the step may write to wait until then [page-fence].

Nearly all tokens are plain: the request decodes, has no pending finish, and does not end with the token. `_decodes` has
the same effect for them as the rules above. It runs once per generated token, so it limits how many requests one
scheduler can serve.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.executor.interface import DeviceLostError, StepFault, fault_of
from tandem_engine.forward.batch import ForwardResult, SampledLogprobs
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import Finish, FinishReason, TokenLogprob
from tandem_engine.messages.requests import request_id_of
from tandem_engine.scheduler.counters import Tally
from tandem_engine.scheduler.fault_isolation import Isolation
from tandem_engine.scheduler.finishing import Endings, Steps, error_finish
from tandem_engine.scheduler.output_stream import OutputStream
from tandem_engine.scheduler.prefill_adder import Extend
from tandem_engine.scheduler.queues import Queues
from tandem_engine.scheduler.request import GRAMMAR_ENDED, GrammarProgress, Request, hands_over_session, sends_kv
from tandem_engine.scheduler.schedule_batch import ScheduleBatch
from tandem_engine.scheduler.speculation import Speculation
from tandem_engine.scheduler.step_times import StepTimes
from tandem_engine.scheduler.stop import Cut, PlainEnd, StopRule

logger = logging.getLogger(__name__)


class Sampled(NamedTuple):
    """New tokens of one request from one step: a run of one, unless they were drafted."""

    run: tuple[int, ...]
    logprobs: tuple[SampledLogprobs | None, ...] = ()
    sound: bool = True
    """False when the logits it was drawn from are no numbers."""


@dataclass(kw_only=True, slots=True)
class Settlement:
    """Applies one result to the requests of its batch."""

    memory: KvMemory
    queues: Queues
    steps: Steps
    stop: StopRule
    endings: Endings
    isolation: Isolation
    stream: OutputStream
    stopwatch: Clock
    """Durations only: it may read differently on other ranks."""
    tally: Tally
    step_times: StepTimes
    speculation: Speculation | None = None

    def settle(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        """Take in the result of `batch`."""
        assert result.step == batch.step, f"result of step {result.step} for batch {batch.step}"
        self._close(batch)
        self._measure(batch, result)
        self._prompt_scores(batch, result)
        self._pooled(batch, result)
        sampled = _sampled(result)
        for extend in batch.extends:
            self._extend(extend, next(sampled) if extend.samples else None)
        if result.logprobs or result.corrupted or batch.drafts.chains:
            for (req, drafts), one in zip(batch.decode_runs, sampled, strict=True):
                self._decode(req, one, drafted=len(drafts))
        else:
            first = sum(extend.samples for extend in batch.extends)
            self._decodes(batch.decodes, result.next_token_ids[first:])
        if self.memory.windows:
            self._pass_by(batch)

    def _pass_by(self, batch: ScheduleBatch) -> None:
        """What is committed moves the windows of requests that continue."""
        for req in batch.requests:
            if req.kv is not None and req.finished is None:
                self.memory.pass_by(req.kv)

    def _prompt_scores(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        for scores in result.prompt_scores:
            req = batch.extends[scores.sequence].req
            if req.finished is None:
                assert req.prompt_logprobs is not None, f"prompt logprobs of {req.rid}, which requires none"
                req.prompt_logprobs.take(scores.first, [*_wire_logprobs(scores.logprobs)])

    def _pooled(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        for pooled in result.pooled:
            req = batch.extends[pooled.sequence].req
            if req.finished is None:
                assert req.pooled is not None, f"pooled hidden states of {req.rid}, which requires none"
                req.pooled.take(pooled)

    def fail(self, batch: ScheduleBatch, error: BaseException, *, above: ScheduleBatch | None) -> None:
        """The forward of `batch` raised: its requests are tried apart, all others continue.

        `above` was launched on top of it and has come back too, well or not: its results count for nothing.

        Raises:
            DeviceLostError: no later step can succeed.
        """
        rids = [req.rid for req in batch.requests]
        fields = {"step": batch.step, "rids": rids, "request_ids": sorted({request_id_of(rid) for rid in rids})}
        logger.error(
            "step %d failed with %d requests: %s: %s",
            batch.step,
            len(batch.requests),
            type(error).__name__,
            error,
            extra={"fields": fields},
        )
        if fault_of(error) is StepFault.DEVICE_LOST:
            raise DeviceLostError(f"step {batch.step} lost the device: {error}") from error
        self.tally.engine_errors += 1
        self._void(batch)
        if above is not None:
            self._void(above)
        self.isolation.isolate(batch.requests, () if above is None else above.requests, error)

    def _void(self, batch: ScheduleBatch) -> None:
        """`batch` is over and yielded nothing."""
        self._close(batch)
        for extend in batch.extends:
            self._landed(extend.req, tokens=int(extend.samples))
        for req, drafts in batch.decode_runs:
            self._landed(req, tokens=1 + len(drafts))

    def _close(self, batch: ScheduleBatch) -> None:
        """The device is done with this step, so what waited for it is free, before anything is released."""
        self.steps.settle(batch.step)
        self.memory.settled(batch.step)
        self.tally.settled += 1

    def _landed(self, req: Request, *, tokens: int) -> None:
        req.steps_in_flight -= 1
        req.tokens_in_flight -= tokens
        assert req.steps_in_flight >= 0 <= req.tokens_in_flight, (
            f"request {req.rid}: {req.steps_in_flight} steps and {req.tokens_in_flight} tokens in flight"
        )

    def _extend(self, extend: Extend, sampled: Sampled | None) -> None:
        req = extend.req
        self._landed(req, tokens=int(sampled is not None))
        if req.finished is not None:
            return
        self.memory.commit(req.held_kv, extend.stop)
        if req.to_finish is not None:
            self.endings.finish(req, req.to_finish)
            return
        if sampled is not None and not sampled.sound:
            self._end_corrupted(req)
            return
        self._cache(req)
        if sampled is not None:
            self.queues.prompt_computed(req)
        for stage in self.queues.stages:
            stage.chunk_settled(req)
        if sampled is not None and req.finished is None:
            self._tokens(req, sampled)
            self._hand_off(req)

    def _decodes(self, decodes: Sequence[Request], token_ids: Sequence[int]) -> None:
        """`_decode` for each, the short way where the token is plain."""
        plain = 0
        for req, token in zip(decodes, token_ids, strict=True):
            end = req.plain_end
            if (
                end is None
                or token in end.token_ids
                or len(req.output_ids) + 1 >= end.limit
                or req.finished is not None
                or req.to_finish is not None
            ):
                self._decode(req, Sampled(run=(token,)))
                continue
            req.steps_in_flight -= 1
            req.tokens_in_flight -= 1
            self.memory.commit_next(req.held_kv)
            req.output_ids.append(token)
            self.stream.send_token(req, token)
            plain += 1
        self.tally.output_tokens += plain

    def _decode(self, req: Request, sampled: Sampled, *, drafted: int = 0) -> None:
        """`drafted` tokens of `req` were verified."""
        self._landed(req, tokens=1 + drafted)
        if req.finished is not None:
            return
        # The step computed KV of the newest settled token; the one it sampled has none yet.
        self.memory.commit(req.held_kv, req.seq_len)
        if req.to_finish is not None:
            self.endings.finish(req, req.to_finish)
            return
        if not sampled.sound:
            self._end_corrupted(req)
            return
        if drafted:
            self._take_back(req, drafted=drafted, accepted=len(sampled.run) - 1)
        self._tokens(req, sampled)

    def _take_back(self, req: Request, *, drafted: int, accepted: int) -> None:
        """Rejected drafts were never launched: the next step writes over their KV."""
        req.launched_len -= drafted - accepted
        if self.speculation is not None:
            self.speculation.learn(req, drafted=drafted, accepted=accepted)

    def _end_corrupted(self, req: Request) -> None:
        """NaN in its logits is NaN in its KV: it ends, and its pages do not enter the cache."""
        self.tally.corrupted += 1
        error = f"request {req.rid}: the model computed NaN or infinite logits after {req.seq_len} tokens"
        logger.error("%s", error, extra={"fields": {**req.about, "step": self.steps.settled}})
        finish = Finish(reason=FinishReason.ERROR, error=error, code="engine_error", retryable=False)
        self.endings.finish(req, finish, checkpoint=False)

    def _cache(self, req: Request) -> None:
        """Let others share what is computed of the prompt while the rest, and its output, continue.

        This may exchange pages for equal ones of the tree and give the request's own back. One whose pages are
        being sent, which happens outside any step, therefore shares only what the tree does not have, and
        otherwise waits for its release.
        """
        kv = req.held_kv
        settled = req.token_ids(0, kv.committed_len)
        if sends_kv(req) and not self.memory.is_news(kv, settled):
            return
        self.memory.checkpoint(kv, settled, after_step=self.steps.newest_in_flight)

    def _tokens(self, req: Request, sampled: Sampled) -> None:
        cut = self.stop.cut_at_stop(req.sampling, prompt_len=req.prompt_len, outputs=req.output_ids, run=sampled.run)
        if req.grammar is not None:
            cut = _cut_by_grammar(req.grammar, sampled.run, cut)
            if cut.finish is GRAMMAR_ENDED and hands_over_session(req):
                cut = Cut(keep=cut.keep, finish=None)
        req.output_ids += sampled.run[: cut.keep]
        if cut.keep > 1:
            # Accepted drafts were computed; the newest token never is when it is sampled.
            self.memory.commit(req.held_kv, req.seq_len - 1)
        if req.sampling.logprobs is not None:
            req.logprobs += _wire_logprobs(sampled.logprobs[: cut.keep])
        self.tally.output_tokens += cut.keep
        first = req.first_token_at is None
        if first:
            req.first_token_at = self.stopwatch.now()
        if cut.finish is None:
            if first:
                req.plain_end = self._plain_end(req)
            self.stream.send(req, first=first)
        else:
            self.endings.finish(req, cut.finish, first=first)

    def _plain_end(self, req: Request) -> PlainEnd | None:
        """None for a request of which settlement has to know more than its tokens."""
        sampling = req.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None or sampling.masked:
            return None
        return self.stop.plain_end(sampling, prompt_len=req.prompt_len)

    def _hand_off(self, req: Request) -> None:
        """Offer a request with a computed prompt to the stages; without a taker it decodes here."""
        answers = [stage.prefill_settled(req) for stage in self.queues.stages]
        kept = any(answers)
        if req.finished is not None:
            assert not kept, f"a stage kept request {req.rid}, which had finished"
        elif kept:
            assert not req.steps_in_flight, f"request {req.rid} left while in flight"
            self.queues.forget(req)
        elif sends_kv(req):
            self.queues.running.append(req)

    def _measure(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        """The means are of steps of one kind; a run of several tokens counts as that many decode steps."""
        if self.speculation is not None:
            self.speculation.verified(batch.drafts)
        if not batch.decodes:
            self.tally.measure_prefill(batch.extend_tokens, result.compute_s)
            return
        runs = result.accept_lens
        tokens_per_run = sum(runs) / len(runs) if runs else 1.0
        spent = batch.drafts.propose_s + batch.drafts.queued_s() + result.compute_s
        self.step_times.note(batch, spent, tokens_per_run)
        if not batch.extends:
            self.tally.measure_decode(spent / tokens_per_run)
            if self.speculation is not None:
                self.speculation.settled(batch.drafts, batch=len(batch.decodes))


def _cut_by_grammar(grammar: GrammarProgress, run: Sequence[int], cut: Cut) -> Cut:
    """A token that breaks the grammar ends its request, before it becomes output."""
    before = grammar.followed
    try:
        return grammar.cut(run, cut)
    except InvalidRequestError as error:
        return Cut(keep=grammar.followed - before, finish=error_finish(error))


def _sampled(result: ForwardResult) -> Iterator[Sampled]:
    """What each sampling sequence got, in batch order."""
    sampled = _pairs(result)
    if not result.corrupted:
        return sampled
    corrupted = frozenset(result.corrupted)
    return (each._replace(sound=index not in corrupted) for index, each in enumerate(sampled))


def _pairs(result: ForwardResult) -> Iterator[Sampled]:
    if result.accept_lens:
        return _runs(result)
    if not result.logprobs:
        return (Sampled(run=(token,)) for token in result.next_token_ids)
    pairs = zip(result.next_token_ids, result.logprobs, strict=True)
    return (Sampled(run=(token,), logprobs=(logprob,)) for token, logprob in pairs)


def _runs(result: ForwardResult) -> Iterator[Sampled]:
    start = 0
    for length in result.accept_lens:
        run = slice(start, start + length)
        yield Sampled(run=result.next_token_ids[run], logprobs=result.logprobs[run])
        start += length
    assert start == len(result.next_token_ids), f"runs of {start} tokens, {len(result.next_token_ids)} were sampled"


def _wire_logprobs(logprobs: Sequence[SampledLogprobs | None]) -> Iterator[TokenLogprob]:
    for logprob in logprobs:
        assert logprob is not None, "a request requires logprobs and its step returned none"
        yield TokenLogprob(logprob=logprob.logprob, top=logprob.top, rank=logprob.rank)
