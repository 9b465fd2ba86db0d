"""Names of spans and their attributes, for gateways and workers.

`gen_ai.…` and `http.…` are from OpenTelemetry's semantic conventions. Other attributes have vLLM's name where vLLM has
one (`gen_ai.request.id`, `gen_ai.latency.…`), and `tandem.…` otherwise. Durations are in seconds unless a name contains
`_ms`.
"""

from tandem_engine.messages.outputs import CacheHits

PROVIDER = "tandem"

# Spans.
QUEUE = "queue"
ROUTE = "route"
ATTEMPT = "attempt"

LLM_REQUEST = "llm_request"
"""vLLM's name for the part of an engine."""

PREFILL = "prefill"
KV_SEND = "kv_send"
KV_RECEIVE = "kv_receive"
DECODE = "decode"

FIRST_TOKEN = "first_token"  # noqa: S105
"""An event."""

# OpenTelemetry: HTTP and errors.
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
ERROR_TYPE = "error.type"

# OpenTelemetry: generative AI.
OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
CHOICE_COUNT = "gen_ai.request.choice.count"
STREAM = "gen_ai.request.stream"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"

# vLLM.
REQUEST_ID = "gen_ai.request.id"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"  # noqa: S105
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
E2E = "gen_ai.latency.e2e"

# Tandem: requests and their attempts.
TENANT = "tandem.tenant"
CHOICE = "tandem.choice"
UNTRACED_CHOICES = "tandem.choices_without_spans"
ATTEMPT_ID = "tandem.attempt.id"
ATTEMPT_NUMBER = "tandem.attempt.number"
OUTCOME = "tandem.attempt.outcome"
RESUMED_TOKENS = "tandem.resumed_tokens"
DECODE_WORKER = "tandem.worker.decode"
PREFILL_WORKER = "tandem.worker.prefill"

LINK = "tandem.link"
"""Of a link to the attempt before: retries, resumes or moves."""

# Tandem: the router's decision.
POLICY = "tandem.route.policy"
SOURCE = "tandem.route.source"
REASON = "tandem.route.reason"
PLACEMENT = "tandem.route.placement"
MATCHED_TOKENS = "tandem.route.matched_tokens"
PREDICTED = "tandem.route.predicted_seconds"
TERMS = "tandem.route.terms"

# Tandem: what engines did.
WORKER = "tandem.worker"
HANDOFF = "tandem.handoff"
RETRACTIONS = "tandem.retractions"
CACHED_HOST_TOKENS = "tandem.cache.host_tokens"
CACHED_DISK_TOKENS = "tandem.cache.disk_tokens"

CACHED_FETCHED_TOKENS = "tandem.cache.fetched_tokens"
"""Of the cached tokens, those that were not simply on the device; absent for none."""

TRANSFER_BYTES = "tandem.transfer.bytes"
TRANSFER_PAGES = "tandem.transfer.pages"
TRANSFER_REUSED = "tandem.transfer.pages_reused"
TRANSFER_MS = "tandem.transfer.duration_ms"
TRANSFER_EXPOSED_MS = "tandem.transfer.exposed_ms"
FETCH_PEER = "tandem.fetch.peer"
FETCH_PAGES = "tandem.fetch.pages"
FETCH_BYTES = "tandem.fetch.bytes"
FETCH_MS = "tandem.fetch.duration_ms"


def hit_attributes(hits: CacheHits | None) -> dict[str, int]:
    """Of those that were not simply on the device, by place: only where there are some."""
    if hits is None:
        return {}
    tokens = {
        CACHED_HOST_TOKENS: hits.host,
        CACHED_DISK_TOKENS: hits.disk,
        CACHED_FETCHED_TOKENS: hits.fetched,
    }
    return {name: count for name, count in tokens.items() if count}
