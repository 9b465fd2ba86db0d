"""Where KV is found and how it moves."""

from grafana import Panel, Query, Row
from queries import BY_WORKER, added, each, gateway, link, per_second, percentiles, ratio, worker

CACHE = Row(
    "Prefix cache by tier",
    (
        Panel(
            title="Prompt tokens found, by tier",
            description="On the device, copied back from host memory, read from files.",
            unit="short",
            queries=(Query(per_second(worker("prefix_cache_hit_tokens_total"), "tier"), "{{tier}}"),),
            stacked=True,
        ),
        Panel(
            title="Share of prompt tokens found",
            description="Over all requests, as gateways saw it.",
            unit="percentunit",
            queries=each(found=ratio(gateway("cached_prompt_tokens_total"), gateway("prompt_tokens_total"))),
        ),
        Panel(
            title="Cached pages and blocks",
            description="Pages that only the prefix cache holds, host pages in use and in all, blocks in files.",
            unit="short",
            queries=each(
                evictable=added(worker("kv_pages_evictable")),
                host_in_use=added(worker("host_pages_used")),
                host=added(worker("host_pages")),
                files=added(worker("stored_blocks")),
            ),
        ),
    ),
)

TRANSFER = Row(
    "Transfers and fetches",
    (
        Panel(
            title="KV transfer",
            description="On decode workers, from the grant of pages to their commit; includes computing the prompt.",
            unit="s",
            queries=percentiles("kv_transfer_seconds"),
        ),
        Panel(
            title="Exposed transfer",
            description="Of it, what came after the prompt was computed: what the transfer adds to the first token.",
            unit="s",
            queries=percentiles("kv_transfer_exposed_seconds"),
        ),
        Panel(
            title="KV moved",
            description="From prefill to decode workers, and as prefixes that workers fetch from each other.",
            unit="Bps",
            queries=each(
                transfers=per_second(worker("kv_transfer_bytes_total")),
                fetches=per_second(worker("prefix_fetch_bytes_total")),
            ),
        ),
        Panel(
            title="Prefix fetches",
            description="Missed: evicted at the source. Failed: late, torn, refused or lost. Skipped: not asked for.",
            unit="ops",
            queries=each(
                fetched=per_second(worker("prefix_fetch_fetched_total")),
                missed=per_second(worker("prefix_fetch_missed_total")),
                failed=per_second(worker("prefix_fetch_failed_total")),
                skipped=per_second(worker("prefix_fetch_skipped_total")),
            ),
            stacked=True,
        ),
        Panel(
            title="Mean wait for a fetch",
            description="From asking to the end. It is part of the wait at workers.",
            unit="s",
            queries=(
                Query(
                    ratio(
                        worker("prefix_fetch_wait_seconds_total"), worker("prefix_fetch_requested_total"), "instance"
                    ),
                    BY_WORKER,
                ),
            ),
        ),
        Panel(
            title="Links",
            description="Bytes per second of writes to each peer, measured at join and kept current.",
            unit="Bps",
            queries=(Query(link("bytes_per_second"), "{{instance}} → {{peer}} {{transport}}"),),
        ),
    ),
)
