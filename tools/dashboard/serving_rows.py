"""What users feel, and where their requests go: rows about gateways."""

from grafana import Panel, Query, Row
from queries import added, each, gateway, per_second, percentiles

SERVER_ERRORS = per_second(gateway("requests_total", 'code=~"5.."'))

SERVICE = Row(
    "Service level",
    (
        Panel(
            title="Time to first token",
            description="From a request's arrival at the gateway to its first token, queues included.",
            unit="s",
            queries=percentiles("time_to_first_token_seconds"),
        ),
        Panel(
            title="Inter-token latency",
            description="Between two tokens of a choice. Long prompts computed by decode workers raise its p99.",
            unit="s",
            queries=percentiles("inter_token_latency_seconds"),
        ),
        Panel(
            title="End to end",
            description="From a request's arrival to its last byte.",
            unit="s",
            queries=percentiles("e2e_request_latency_seconds"),
        ),
        Panel(
            title="Requests by status",
            description="HTTP answers; 499 is a client that left.",
            unit="reqps",
            queries=(Query(per_second(gateway("requests_total"), "code"), "{{code}}"),),
            stacked=True,
        ),
        Panel(
            title="Share of errors",
            description="Answers with status 5xx, of all. 503 says that no worker could take the request.",
            unit="percentunit",
            queries=each(errors=f"({SERVER_ERRORS} or vector(0)) / {per_second(gateway('requests_total'))}"),
        ),
        Panel(
            title="Tokens",
            description="Prompt tokens of finished requests, those of them found in a prefix cache, and output.",
            unit="short",
            queries=each(
                prompt=per_second(gateway("prompt_tokens_total")),
                cached=per_second(gateway("cached_prompt_tokens_total")),
                output=per_second(gateway("generation_tokens_total")),
            ),
        ),
    ),
)

QUEUE = Row(
    "Queue and tenants",
    (
        Panel(
            title="Requests in gateways",
            description="Being answered, and waiting for a worker with room. Waiting ones that stay: add workers.",
            unit="short",
            queries=each(
                running=added(gateway("num_requests_running")), waiting=added(gateway("num_requests_waiting"))
            ),
        ),
        Panel(
            title="Wait in the gateways' queue",
            description="Of requests that got a worker.",
            unit="s",
            queries=percentiles("queue_wait_seconds"),
        ),
        Panel(
            title="Wait at workers",
            description="From receipt by a worker to the first scheduled step; a prefix that is fetched counts.",
            unit="s",
            queries=percentiles("request_queue_time_seconds"),
        ),
        Panel(
            title="Waiting by tenant",
            description="Tenants of the key file. The one that has had least goes first.",
            unit="short",
            queries=(Query(added(gateway("tenant_requests_waiting"), "tenant"), "{{tenant}}"),),
            stacked=True,
        ),
        Panel(
            title="Tokens by tenant",
            description="Prompt and output tokens of ended requests.",
            unit="short",
            queries=(Query(per_second(gateway("tenant_tokens_total"), "tenant"), "{{tenant}}"),),
            stacked=True,
        ),
        Panel(
            title="Refusals",
            description="By the queue, by a tenant's limit, for a key. Limits decided locally: Redis is away.",
            unit="reqps",
            queries=(
                Query(per_second(gateway("queue_refusals_total"), "reason"), "queue: {{reason}}"),
                Query(per_second(gateway("requests_limited_total"), "tenant", "limit"), "{{tenant}}: {{limit}}"),
                Query(per_second(gateway("authentication_failures_total"), "reason"), "key: {{reason}}"),
                Query(per_second(gateway("limits_local_total")), "decided locally"),
            ),
        ),
    ),
)

ROUTING = Row(
    "Routing",
    (
        Panel(
            title="Placement of prefill",
            description="pair: a prefill worker; local: the decode worker, predicted to be faster; degraded: the "
            "decode worker, because no prefill worker can. Degraded ones: bring back prefill workers.",
            unit="reqps",
            queries=(Query(per_second(gateway("placements_total"), "placement"), "{{placement}}"),),
            stacked=True,
        ),
        Panel(
            title="Route decisions by reason",
            description="What spoke for the workers: their session, a prefix to fetch, a cached prefix, or load.",
            unit="reqps",
            queries=(Query(per_second(gateway("route_decisions_total"), "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            title="Route decisions by source",
            description="redis: with the shared index; local: a gateway's last view, because Redis was away or slow.",
            unit="reqps",
            queries=(Query(per_second(gateway("route_decisions_total"), "source"), "{{source}}"),),
            stacked=True,
        ),
        Panel(
            title="Time of a route decision",
            description="One round trip to Redis, or less where a gateway decides by itself.",
            unit="s",
            queries=percentiles("route_decision_seconds"),
        ),
    ),
)
