"""The statistics of an engine, gathered from scheduler, memory and transfers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_engine.base.recording import errors
from tandem_engine.disaggregation.base import PrefixCounters
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.kernels.compiles import COMPILED
from tandem_engine.memory.page_copies import CopyKind
from tandem_engine.memory.state_anchors import AnchorCounts
from tandem_engine.messages.outputs import Finish, TokenLogprob, TokenOutput, TransferReport
from tandem_engine.messages.stats import EngineStats, PrefixFetchStats, StateAnchorStats
from tandem_engine.scheduler.scheduler import Scheduler


@dataclass(kw_only=True, slots=True)
class Throughput:
    """Output tokens per second between one report and the next."""

    clock: Clock
    tokens: int = 0
    measured_at: float | None = None

    def measure(self, tokens: int) -> float:
        """`tokens`: the total so far. 0 the first time, when there is no span to measure over."""
        now = self.clock.now()
        span = 0.0 if self.measured_at is None else now - self.measured_at
        gained = tokens - self.tokens
        self.tokens, self.measured_at = tokens, now
        return gained / span if span > 0.0 else 0.0


def engine_stats(
    scheduler: Scheduler, handoff: HandoffStage | None, throughput: Throughput, *, total_pages: int
) -> EngineStats:
    """One report for the worker service."""
    stats = scheduler.stats()
    memory = scheduler.memory
    host = memory.host
    free_pages, evictable_pages = memory.load()
    transfers = None if handoff is None else handoff.counters
    return EngineStats(
        loop_count=stats.loop_count,
        running=stats.running,
        waiting=stats.waiting,
        transferring=0 if handoff is None else handoff.transferring(),
        inflight=0 if handoff is None else handoff.inflight(),
        waiting_tokens=stats.waiting_tokens,
        oldest_wait_s=stats.oldest_wait_s,
        free_pages=free_pages,
        evictable_pages=evictable_pages,
        total_pages=total_pages,
        quarantined_pages=0 if handoff is None else handoff.quarantined_pages(),
        quarantined_for=() if handoff is None else handoff.quarantined_for(),
        fenced_writers=() if handoff is None else handoff.fenced_writers(),
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_step_s=stats.decode_step_s,
        step_base_s=stats.step_base_s,
        step_fit=stats.step_fit,
        step_fit_errors_total=stats.step_fit_errors_total,
        recording_errors_total=sum(errors().values()),
        prompt_tokens_total=stats.prompt_tokens_total,
        cached_tokens_total=stats.cached_tokens_total,
        output_tokens_total=stats.output_tokens_total,
        requests_total=stats.requests_total,
        aborted_total=stats.aborted_total,
        retracted_total=stats.retracted_total,
        transfers_total=0 if transfers is None else transfers.committed,
        transfer_failures_total=0 if transfers is None else transfers.failed,
        transfer_bytes_total=0 if transfers is None else transfers.bytes_received,
        handed_over_total=0 if transfers is None else transfers.handed_over,
        transfer_exposed_s=0.0 if transfers is None else transfers.exposed_s,
        digest_mismatches_total=0 if transfers is None else transfers.digest_mismatches,
        transfer_unexpected_errors_total=0 if handoff is None else handoff.transport.errors,
        overlap_hidden_s=stats.overlap_hidden_s,
        schedule_s=stats.schedule_s,
        plan_s=stats.plan_s,
        launch_s=stats.launch_s,
        settle_s=stats.settle_s,
        wait_s=stats.wait_s,
        failed_total=stats.failed_total,
        refused_total=stats.refused_total,
        engine_errors_total=stats.engine_errors_total,
        poison_requests_total=stats.poison_requests_total,
        corrupted_requests_total=stats.corrupted_requests_total,
        audit_failures_total=stats.audit_failures_total,
        output_tokens_per_s=throughput.measure(stats.output_tokens_total),
        paused=stats.paused,
        preempted_total=stats.preempted_total,
        head_waits=stats.head_waits,
        speculation=stats.speculation,
        host_cached_tokens_total=stats.host_cached_tokens_total,
        disk_cached_tokens_total=stats.disk_cached_tokens_total,
        unusable_tokens_total=stats.unusable_tokens_total,
        state_anchors=None if memory.anchors is None else _state_anchors(memory.anchors.counts),
        host_pages=0 if host is None else host.pool.num_pages,
        host_pages_used=0 if host is None else host.pool.num_pages - host.tier.pages.available,
        host_load_pages_per_s=memory.copies.pages_per_s(CopyKind.HOST_TO_DEVICE) or 0.0,
        stored_blocks=0 if host is None else host.stored_blocks,
        blocks_not_stored_total=0 if host is None else host.not_stored_blocks,
        swapped=stats.swapped,
        swapped_out_total=stats.swapped_out_total,
        swapped_in_total=stats.swapped_in_total,
        swap_misses_total=stats.swap_misses_total,
        leaving=stats.leaving,
        moved_total=0 if transfers is None else transfers.moved,
        move_failures_total=0 if transfers is None else transfers.moves_failed,
        prefix_fetch=PrefixFetchStats() if handoff is None else _prefix_fetch(handoff.prefixes.counters),
        links=() if handoff is None else handoff.links.reports(),
        kernels_compiled_starting=COMPILED.counts.starting,
        kernels_compiled_serving=COMPILED.counts.serving,
    )


def _state_anchors(counts: AnchorCounts) -> StateAnchorStats:
    return StateAnchorStats(
        slots=counts.slots,
        slot_bytes=counts.slot_bytes,
        kept=counts.kept,
        provisional=counts.provisional,
        replaced_total=counts.replaced,
    )


def _prefix_fetch(counters: PrefixCounters) -> PrefixFetchStats:
    return PrefixFetchStats(
        requested_total=counters.asked,
        fetched_total=counters.fetched,
        missed_total=counters.missed,
        failed_total=counters.failed,
        skipped_total=counters.skipped,
        pages_total=counters.pages,
        bytes_total=counters.bytes,
        wait_s=counters.wait_s,
        served_total=counters.served,
        served_pages_total=counters.served_pages,
    )


@dataclass(kw_only=True, slots=True)
class Generation:
    """The output of one request so far."""

    rid: str
    resumed: int
    """Output tokens that the request came with; `token_ids` starts after them."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    embedding: bytes | None = None
    """Little-endian float32 values, for a request with pooling."""
    cached_tokens: int = 0
    transfer: TransferReport | None = None
    finished: Finish | None = None

    @property
    def finish(self) -> Finish:
        """How it ended. Only for a request that has."""
        assert self.finished is not None, f"request {self.rid} has not finished"
        return self.finished

    def take(self, output: TokenOutput) -> None:
        """Accept what is new; positions that came before, from either of two workers, are dropped."""
        known = self.resumed + len(self.token_ids) - output.index
        assert known >= 0, f"{self.rid}: output {output.index} came before {self.resumed + len(self.token_ids)}"
        self.token_ids += output.token_ids[known:]
        if output.logprobs is not None:
            self.logprobs += output.logprobs[known:]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.embedding = output.embedding or self.embedding
        if output.cached_tokens is not None:
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.transfer = output.transfer or self.transfer
        self.finished = output.finish or self.finished


@dataclass(kw_only=True, slots=True)
class Generations:
    """A sink for the scheduler that keeps everything by request id."""

    by_rid: dict[str, Generation] = field(default_factory=dict)

    def expect(self, rid: str, *, resumed: int = 0) -> Generation:
        self.by_rid[rid] = Generation(rid=rid, resumed=resumed)
        return self.by_rid[rid]

    def __call__(self, client: bytes, outputs: Sequence[TokenOutput]) -> None:
        del client  # in this process there is one
        for output in outputs:
            generation = self.by_rid.get(output.rid)
            if generation is not None:
                generation.take(output)

    def take_all(self, rids: Sequence[str]) -> list[Generation]:
        """Hand over finished generations, in the order of `rids`."""
        return [self.by_rid.pop(rid) for rid in rids]
