"""What workers do, and what went wrong and was mended."""

from grafana import Panel, Query, Row
from queries import BY_WORKER, added, each, gateway, link, per_second, ratio, worker

WORKER = Row(
    "Workers",
    (
        Panel(
            title="Running requests",
            description="In the running batch.",
            unit="short",
            queries=(Query(worker("num_requests_running"), BY_WORKER),),
            stacked=True,
        ),
        Panel(
            title="Waiting requests",
            description="For their turn, for KV from a peer, for their own KV to be sent, or swapped to host memory.",
            unit="short",
            queries=each(
                queued=added(worker("num_requests_waiting")),
                receiving=added(worker("num_requests_transferring")),
                sending=added(worker("num_requests_inflight")),
                swapped=added(worker("num_requests_swapped")),
            ),
            stacked=True,
        ),
        Panel(
            title="Why the queue's head waits",
            description="Workers by the reason why their first waiting request was not admitted.",
            unit="short",
            queries=(Query(added(worker("queue_head_waits"), "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            title="KV usage",
            description="Share of pages that are neither free nor evictable. Near 1 requests are preempted.",
            unit="percentunit",
            queries=(Query(worker("kv_cache_usage_perc"), BY_WORKER),),
        ),
        Panel(
            title="Decode step",
            description="Recent mean duration.",
            unit="s",
            queries=(Query(worker("decode_step_seconds"), BY_WORKER),),
        ),
        Panel(
            title="Where a step's time goes",
            description="Seconds per turn of the scheduler: choosing, building batches, taking results in, and waiting "
            "for the model. Hidden: of the first three, beside a forward.",
            unit="s",
            queries=each(
                plan=ratio(worker("plan_seconds_total"), worker("scheduler_steps_total")),
                launch=ratio(worker("launch_seconds_total"), worker("scheduler_steps_total")),
                settle=ratio(worker("settle_seconds_total"), worker("scheduler_steps_total")),
                wait=ratio(worker("step_wait_seconds_total"), worker("scheduler_steps_total")),
                hidden=ratio(worker("schedule_hidden_seconds_total"), worker("scheduler_steps_total")),
            ),
        ),
        Panel(
            title="Output tokens per second",
            description="By worker.",
            unit="short",
            queries=(Query(per_second(worker("generation_tokens_total"), "instance"), BY_WORKER),),
            stacked=True,
        ),
        Panel(
            title="Preemptions",
            description="Preempted requests; of them for a higher priority, and with KV kept in host memory.",
            unit="ops",
            queries=each(
                all=per_second(worker("num_preemptions_total")),
                for_priority=per_second(worker("num_priority_preemptions_total")),
                swapped=per_second(worker("swapped_out_total")),
            ),
        ),
        Panel(
            title="Tokens per drafted run",
            description="Of workers that speculate: accepted drafts and the bonus token, recent mean.",
            unit="short",
            queries=(Query(worker("spec_decode_accept_length"), BY_WORKER),),
        ),
    ),
)

LOST = 'outcome!="exported"'

FAILURES = Row(
    "Failures and recoveries",
    (
        Panel(
            title="Attempts that did not finish",
            description="By outcome: worker_lost, worker_error, unreachable, overloaded, silence … Clients see a "
            "pause until another worker resumes. moved: the worker drained; stopped: the client had enough.",
            unit="ops",
            queries=(Query(per_second(gateway("attempts_total", 'outcome!="finished"'), "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            title="Resumptions",
            description="Attempts that resumed after tokens of the attempt before, by how that one ended.",
            unit="ops",
            queries=(Query(per_second(gateway("resumptions_total"), "cause"), "{{cause}}"),),
            stacked=True,
        ),
        Panel(
            title="Transfers that failed",
            description="Digest mismatches are pages that arrived damaged: check memory and network of that machine. "
            "Per second; of links, how many are broken now.",
            unit="short",
            queries=(
                Query(per_second(worker("kv_digest_mismatches_total"), "instance"), "digest, {{instance}}"),
                Query(per_second(worker("kv_transfer_failures_total"), "instance"), "transfer, {{instance}}"),
                Query(added(link("broken"), "instance"), "broken links, {{instance}}"),
            ),
        ),
        Panel(
            title="Errors in engines",
            description="Steps that raised, requests ended for it, NaN logits, audits that found a lost page.",
            unit="ops",
            queries=each(
                steps=per_second(worker("step_errors_total")),
                poison=per_second(worker("poison_requests_total")),
                corrupted=per_second(worker("corrupted_requests_total")),
                audits=per_second(worker("audit_failures_total")),
            ),
        ),
        Panel(
            title="Kernels compiled while serving",
            description="By worker, of GPUs: requests waited for each. Should be 0; the worker's log names the kernel.",
            unit="ops",
            queries=(Query(per_second(worker("kernel_compiles_total", 'when="serving"'), "instance"), BY_WORKER),),
        ),
        Panel(
            title="Quarantine and retries",
            description="Requests quarantined for killing workers, refused for it, and choices ended because the retry "
            "budget was spent.",
            unit="ops",
            queries=each(
                quarantined=per_second(gateway("requests_quarantined_total")),
                refused=per_second(gateway("quarantine_refusals_total")),
                retries_refused=per_second(gateway("retries_refused_total")),
            ),
        ),
        Panel(
            title="Pages out of use",
            description="Kept until a silent writer is fenced. They stay: restart that writer.",
            unit="short",
            queries=(Query(worker("kv_pages_quarantined"), BY_WORKER),),
        ),
        Panel(
            title="Workers that may be chosen",
            description="Registered, offered to the router, draining.",
            unit="short",
            queries=each(
                registered=added(worker("registered")),
                offered=added(worker("offered")),
                draining=added(worker("draining")),
            ),
        ),
        Panel(
            title="Requests that left draining workers",
            description="With their KV, or computed again elsewhere.",
            unit="ops",
            queries=each(
                moved=per_second(worker("requests_moved_total")),
                computed_again=per_second(worker("request_moves_failed_total")),
            ),
        ),
        Panel(
            title="Redis and the network",
            description="Redis commands without a usable answer, replays of prefix caches to the index, workers that "
            "answered after their connection was lost, stale key files.",
            unit="short",
            queries=each(
                redis_failures=per_second(worker("redis_failures_total")),
                index_replays=per_second(worker("index_replays_total")),
                workers_answering_again=per_second(gateway("workers_answering_again_total")),
                stale_key_files=added(gateway("api_keys_stale")),
            ),
        ),
        Panel(
            title="Spans that were lost",
            description="Of traces: dropped because too many waited, failed because the collector did not take them; "
            "requests that an engine could not report. No data: tracing is off.",
            unit="ops",
            queries=(
                Query(per_second(gateway("trace_spans_total", LOST), "outcome"), "gateway: {{outcome}}"),
                Query(per_second(worker("trace_spans_total", LOST), "outcome"), "worker: {{outcome}}"),
                Query(per_second(worker("trace_requests_unreported_total")), "unreported"),
            ),
        ),
    ),
)
