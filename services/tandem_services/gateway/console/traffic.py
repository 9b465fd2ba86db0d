"""What clients of this gateway have lately got, from its journal of requests."""

import msgspec

from tandem_services.gateway.explain import RequestRecord
from tandem_services.gateway.request_journal import RequestJournal

SAMPLES = 200
"""Requests that are looked at: enough for a 95th percentile, few enough to be summed up every second."""
ROWS = 100
REFUSED_ROWS = 40
"""Of them, requests that were refused before they were accepted: a flood of these leaves room for others."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Of the last `finished` requests that have ended, at most `SAMPLES`."""

    accepted_total: int
    """Since the gateway's start."""
    finished: int
    failed: int
    """Of them, with a status other than 200; 499 is a client that left."""
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    prompt_tokens: int
    cached_tokens: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line about a request. Its whole story is in its record."""

    request_id: str
    tenant: str
    endpoint: str
    model: str
    stream: bool
    created: int
    status: int | None
    """None while it runs."""
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    """More than one per choice: something had to be begun again, or moved."""
    choices: int
    prefill: str | None
    decode: str | None
    """Incarnations of the last attempt; None before there is one."""
    ttft_s: float | None
    e2e_s: float | None


def traffic(journal: RequestJournal) -> Traffic:
    ended = [record for record in journal.latest(SAMPLES) if record.e2e_s is not None]
    times = sorted(choice.ttft_s for record in ended for choice in record.choices if choice.ttft_s is not None)
    return Traffic(
        accepted_total=journal.accepted_total,
        finished=len(ended),
        failed=sum(record.status != 200 for record in ended),
        ttft_p50_s=_percentile(times, 0.50),
        ttft_p95_s=_percentile(times, 0.95),
        prompt_tokens=sum(record.prompt_tokens for record in ended),
        cached_tokens=sum(record.cached_tokens for record in ended),
    )


def latest_requests(journal: RequestJournal) -> list[RequestRow]:
    """Of all tenants, newest first, accepted or refused."""
    records = [*journal.latest_refused(REFUSED_ROWS), *journal.latest(ROWS)]
    return [_row(record) for record in sorted(records, key=lambda each: -each.created)[:ROWS]]


def _row(record: RequestRecord) -> RequestRow:
    attempts = [attempt for choice in record.choices for attempt in choice.attempts]
    last = attempts[-1] if attempts else None
    return RequestRow(
        request_id=record.request_id,
        tenant=record.tenant,
        endpoint=record.endpoint,
        model=record.model,
        stream=record.stream,
        created=record.created,
        status=record.status,
        error=record.error,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        attempts=len(attempts),
        choices=len(record.choices),
        prefill=None if last is None else last.prefill,
        decode=None if last is None else last.decode,
        ttft_s=next((choice.ttft_s for choice in record.choices if choice.ttft_s is not None), None),
        e2e_s=record.e2e_s,
    )


def _percentile(ordered: list[float], share: float) -> float | None:
    """By nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
