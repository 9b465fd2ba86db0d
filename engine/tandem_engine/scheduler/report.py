"""The scheduler's share of what an engine reports of itself."""

from tandem_engine.messages.engine_stats import SpeculationStats
from tandem_engine.scheduler.parts import SchedulerParts, Shared
from tandem_engine.scheduler.speculation import Speculation
from tandem_engine.scheduler.tally import Phase, SchedulerStats


def scheduler_stats(shared: Shared, parts: SchedulerParts) -> SchedulerStats:
    """As it is now."""
    tally = shared.tally
    queues = shared.queues
    return SchedulerStats(
        loop_count=tally.loops,
        running=len(queues.requests) - queues.without_memory,
        waiting=queues.num_waiting,
        waiting_tokens=queues.waiting_tokens(),
        oldest_wait_s=queues.oldest_wait(shared.clock.now()),
        prefill_tokens_per_s=tally.prefill_tokens_per_s,
        decode_step_s=tally.decode_step_s,
        prompt_tokens_total=tally.prompt_tokens,
        cached_tokens_total=tally.cached_tokens,
        output_tokens_total=tally.output_tokens,
        requests_total=tally.requests,
        aborted_total=tally.aborted,
        failed_total=tally.failed,
        refused_total=tally.refused,
        retracted_total=tally.retracted,
        preempted_total=tally.preempted,
        head_waits=parts.planner.head_waits.value if len(queues.waiting) else "",
        swapped=len(queues.swapped),
        swapped_out_total=tally.swapped_out,
        swapped_in_total=tally.swapped_in,
        swap_misses_total=tally.swap_misses,
        host_cached_tokens_total=tally.host_cached_tokens,
        disk_cached_tokens_total=tally.disk_cached_tokens,
        engine_errors_total=tally.engine_errors,
        convicted_total=tally.convicted,
        unsound_total=tally.unsound,
        audit_failures_total=tally.audit_failures,
        overlap_hidden_s=tally.overlap_hidden_s,
        schedule_s=tally.schedule_s,
        speculation=_speculation_stats(shared.speculation),
        plan_s=tally.spent_s[Phase.PLAN],
        launch_s=tally.spent_s[Phase.LAUNCH],
        settle_s=tally.spent_s[Phase.SETTLE],
        wait_s=tally.spent_s[Phase.WAIT],
        paused=parts.pausing.paused,
        leaving=sum(1 for _ in parts.departures.leaving()),
    )


def _speculation_stats(speculation: Speculation | None) -> SpeculationStats | None:
    return None if speculation is None else speculation.tally.stats(speculation.proposer.name)
