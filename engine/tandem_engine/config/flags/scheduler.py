"""Flags of admission, batching, scheduling policy and speculative decoding (docs/scheduling.md)."""

import argparse

from tandem_engine.config import PreemptionMode, SchedulePolicy, SchedulerConfig, SpecAlgorithm, SpecConfig
from tandem_engine.config.flags.types import count, non_negative_int, positive_count, positive_int

_SCHEDULER_FLAGS = (
    "max_running_requests",
    "max_queued_requests",
    "max_sessions",
    "session_ttl",
    "max_tokens_per_step",
    "max_prefill_tokens",
    "mixed_prefill_tokens",
    "shared_prefill_tokens",
    "chunked_prefill_size",
    "long_prefill_token_threshold",
    "policy_ageing_seconds",
    "priority_preemption_threshold",
    "scheduler_delay_factor",
    "watermark",
)
"""Flags that are called as their settings."""


def add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    scheduler = SchedulerConfig()
    group = parser.add_argument_group("scheduler")
    _add_admission_flags(group, scheduler)
    _add_policy_flags(group, scheduler)
    group.add_argument("--disable-mixed-chunk", action="store_true", help="never mix prefill and decode in one step")
    group.add_argument(
        "--disable-overlap-schedule", action="store_true", help="plan a step only after the previous one has completed"
    )
    group.add_argument(
        "--audit-every-step", action="store_true", help="check page conservation after every step (slow)"
    )
    group.add_argument(
        "--preemption-mode",
        choices=[mode.value for mode in PreemptionMode],
        default=scheduler.preemption_mode.value,
        help="treatment of a retracted request's KV: recompute it, swap it to host memory, or auto, the one predicted "
        "to be cheaper; swap needs --swap-space (default: auto)",
    )
    group.add_argument("--force-retract-every", type=non_negative_int, default=0, help=argparse.SUPPRESS)
    group.add_argument("--force-fault-every", type=non_negative_int, default=0, help=argparse.SUPPRESS)


def _add_admission_flags(group: argparse._ArgumentGroup, scheduler: SchedulerConfig) -> None:
    """How much at a time."""
    group.add_argument(
        "--context-length",
        "--max-model-len",
        type=count,
        default=0,
        metavar="N",
        help="longest prompt + output "
        "(default: the model's, at most 4096; on a GPU at most 8192 to 32768, by its memory)",
    )
    group.add_argument(
        "--max-running-requests",
        "--max-num-seqs",
        type=positive_count,
        metavar="N",
        help="maximum number of sequences in one decode batch "
        f"(default: {scheduler.max_running_requests}; 128 to 512 on a GPU, by its memory)",
    )
    group.add_argument(
        "--max-queued-requests",
        type=positive_count,
        default=scheduler.max_queued_requests,
        metavar="N",
        help=f"maximum number of waiting requests; more are rejected (default: {scheduler.max_queued_requests})",
    )
    group.add_argument(
        "--max-tokens-per-step",
        "--max-num-batched-tokens",
        type=count,
        default=scheduler.max_tokens_per_step,
        metavar="N",
        help="maximum number of tokens in one step: one for each running request, the rest for prompts. Must be above "
        "--max-running-requests, so that prompts make progress (default: --max-prefill-tokens + "
        "--max-running-requests)",
    )
    group.add_argument(
        "--max-prefill-tokens",
        type=positive_count,
        metavar="N",
        help="maximum number of prompt tokens in one step "
        f"(default: {scheduler.max_prefill_tokens}; 2048 to 16384 on a GPU, by its memory)",
    )
    group.add_argument(
        "--mixed-prefill-tokens",
        type=count,
        metavar="N",
        help="maximum number of prompt tokens in a step in which other requests decode, whose next tokens wait for it "
        "(default: 0, which is --max-prefill-tokens; 512 to 2048 on a GPU, by its memory)",
    )
    group.add_argument(
        "--shared-prefill-tokens",
        type=count,
        metavar="N",
        help="maximum number of prompt tokens in a step while requests of several tenants have come within seconds: "
        "a tenant's first token waits for a step of another tenant. 0 is no limit of its own "
        f"(default: {scheduler.shared_prefill_tokens}; 256 or 512 on a GPU, by its memory)",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=positive_count,
        metavar="N",
        help="maximum number of prompt tokens of one request in one step "
        f"(default: {scheduler.chunked_prefill_size}; 2048 to 8192 on a GPU, by its memory)",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=count,
        default=scheduler.long_prefill_token_threshold,
        metavar="N",
        help="maximum number of tokens per step of a longer prompt while other requests decode, which limits their "
        "inter-token latency (default: 0: only the chunk size limits it)",
    )


def _add_policy_flags(group: argparse._ArgumentGroup, scheduler: SchedulerConfig) -> None:
    """Which request is admitted next, and when (docs/scheduling.md)."""
    group.add_argument(
        "--schedule-policy",
        "--scheduling-policy",
        choices=[policy.value for policy in SchedulePolicy],
        default=scheduler.schedule_policy.value,
        help="order of waiting requests: first come (fcfs), longest cached prefix (lpm), most requests with "
        "the same cached prefix (dfs-weight), greatest priority (priority), fewest steps left (srf) "
        f"(default: {scheduler.schedule_policy.value})",
    )
    group.add_argument(
        "--policy-ageing-seconds",
        type=float,
        default=scheduler.policy_ageing_seconds,
        metavar="S",
        help="after a wait of S seconds a request is admitted first under every policy except priority, where it "
        f"gains one level per S seconds (default: {scheduler.policy_ageing_seconds:g})",
    )
    group.add_argument(
        "--priority-preemption-threshold",
        "--priority-scheduling-preemption-threshold",
        type=positive_int,
        default=scheduler.priority_preemption_threshold,
        metavar="N",
        help="under the policy priority, a waiting request preempts a running one if its priority is at least N higher "
        f"(default: {scheduler.priority_preemption_threshold})",
    )
    group.add_argument(
        "--scheduler-delay-factor",
        type=float,
        default=scheduler.scheduler_delay_factor,
        metavar="X",
        help="while other requests decode, delay new prompts until the oldest has waited X times the duration of the "
        "last step with prompts, so that more are computed together (default: 0: no delay)",
    )
    group.add_argument(
        "--watermark",
        type=float,
        default=scheduler.watermark,
        metavar="X",
        help=f"share of KV pages that new requests leave free for running ones (default: {scheduler.watermark})",
    )


def scheduler_config(args: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(
        enable_mixed_chunk=not args.disable_mixed_chunk,
        enable_overlap=not args.disable_overlap_schedule,
        audit_every_step=args.audit_every_step,
        preemption_mode=PreemptionMode(args.preemption_mode),
        force_retract_every=args.force_retract_every,
        schedule_policy=SchedulePolicy(args.schedule_policy),
        force_fault_every=args.force_fault_every,
        watchdog_timeout=args.watchdog_timeout,
        **{name: value for name in _SCHEDULER_FLAGS if (value := getattr(args, name)) is not None},
    )


def add_speculative_flags(parser: argparse.ArgumentParser) -> None:
    spec = SpecConfig()
    group = parser.add_argument_group(
        "speculative decoding", "Guess tokens cheaply and verify several in one step. Never changes an output."
    )
    group.add_argument(
        "--speculative-algorithm",
        choices=[algorithm.value for algorithm in SpecAlgorithm],
        help="source of draft tokens. NGRAM: what followed the same tokens earlier (best where outputs quote their "
        "input); DRAFT: a smaller model; EAGLE: a head trained on this model's hidden states (default: no "
        "speculative decoding)",
    )
    group.add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        default=spec.draft_model_path,
        metavar="PATH",
        help="checkpoint directory of the draft model (DRAFT, with the same tokenizer) or of the head (EAGLE)",
    )
    group.add_argument(
        "--speculative-num-draft-tokens",
        type=positive_int,
        default=spec.num_draft_tokens,
        metavar="N",
        help="maximum number of draft tokens per request and step; fewer while few are accepted (default: "
        f"{spec.num_draft_tokens})",
    )
    group.add_argument(
        "--ngram-prompt-lookup-min",
        type=positive_int,
        default=spec.prompt_lookup_min,
        metavar="N",
        help=f"minimum number of repeated tokens for NGRAM to draft (default: {spec.prompt_lookup_min})",
    )
    group.add_argument(
        "--ngram-prompt-lookup-max",
        type=positive_int,
        default=spec.prompt_lookup_max,
        metavar="N",
        help="longest repetition, in tokens, that NGRAM compares to select among matches "
        f"(default: {spec.prompt_lookup_max})",
    )
    group.add_argument(
        "--speculative-disable-by-batch-size",
        type=non_negative_int,
        default=spec.disable_by_batch_size,
        metavar="N",
        help="disable drafts in steps with more than N running requests; 0 never disables them (default: 0)",
    )
    group.add_argument(
        "--speculative-disable-adaptive",
        action="store_true",
        help="always draft the maximum number of tokens, even if few are accepted",
    )


def speculative_config(args: argparse.Namespace) -> SpecConfig:
    algorithm = args.speculative_algorithm
    return SpecConfig(
        algorithm=None if algorithm is None else SpecAlgorithm(algorithm),
        draft_model_path=args.speculative_draft_model_path,
        num_draft_tokens=args.speculative_num_draft_tokens,
        prompt_lookup_min=args.ngram_prompt_lookup_min,
        prompt_lookup_max=args.ngram_prompt_lookup_max,
        disable_by_batch_size=args.speculative_disable_by_batch_size,
        adaptive=not args.speculative_disable_adaptive,
    )
