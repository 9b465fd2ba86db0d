"""Spans of what an engine did for one attempt, below the gateway's span of that attempt.

    llm_request   from receipt to the end
      queue       until the first step that computes the prompt, or until its pages are granted to a sender
      prefill     the prompt, to its first token
      kv_send     its KV to a decode worker      ┐ the two ends of one transfer
      kv_receive  from a prefill worker          ┘
      decode      all further tokens

All moments come from the engine's own report, so building spans later, in another process, moves none of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import Attributes, AttributeValue

from tandem_engine.messages.outputs import FinishReason, TransferReport
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.stats import EndedRequest
from tandem_services.common import span_names as names
from tandem_services.common.span_export import parent_of
from tandem_services.common.span_names import hit_attributes


class Phase(NamedTuple):
    """One part of an attempt. Unix nanoseconds."""

    name: str
    began: int
    ended: int
    attributes: Attributes = None


class EngineSpans:
    """Turns an engine's reports into spans. One per worker service."""

    def __init__(self, tracer: Tracer, *, incarnation: str, model: str) -> None:
        self._tracer = tracer
        self._incarnation = incarnation
        self._model = model

    def record(self, ended: EndedRequest) -> None:
        """All spans of one attempt. They are over, so nothing of it is kept here."""
        span = self._tracer.start_span(
            names.LLM_REQUEST,
            context=parent_of(ended.context),
            kind=SpanKind.SERVER,
            attributes=self._attributes(ended),
            start_time=ended.arrived_ns,
        )
        if ended.first_token_ns is not None:
            span.add_event(names.FIRST_TOKEN, timestamp=ended.first_token_ns)
        below = set_span_in_context(span, Context())
        for phase in phases_of(ended):
            self._tracer.start_span(phase.name, context=below, attributes=phase.attributes, start_time=phase.began).end(
                phase.ended
            )
        if ended.finish is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR, ended.error))
        span.end(ended.ended_ns)

    def _attributes(self, ended: EndedRequest) -> dict[str, AttributeValue]:
        known: dict[str, AttributeValue | None] = {
            names.WORKER: self._incarnation,
            names.RESPONSE_MODEL: self._model,
            names.REQUEST_ID: ended.rid,
            names.HANDOFF: None if ended.side is None else f"{'moving ' if ended.moving else ''}{ended.side.value}",
            names.MAX_TOKENS: ended.max_tokens,
            names.TEMPERATURE: ended.temperature,
            names.TOP_P: ended.top_p,
            names.INPUT_TOKENS: ended.prompt_tokens,
            names.CACHED_TOKENS: ended.cached_tokens,
            **hit_attributes(ended.cache_hits),
            names.OUTPUT_TOKENS: ended.output_tokens,
            names.RESUMED_TOKENS: ended.resumed_tokens or None,
            names.RETRACTIONS: ended.retractions or None,
            names.FINISH_REASONS: None if ended.finish is None else [ended.finish.value],
            names.ERROR_TYPE: ended.error or None,
            names.TIME_IN_QUEUE: _seconds(ended.arrived_ns, ended.scheduled_ns),
            names.TIME_TO_FIRST_TOKEN: _seconds(ended.arrived_ns, ended.first_token_ns),
            names.TIME_IN_PREFILL: _seconds(ended.scheduled_ns, ended.first_token_ns),
            names.TIME_IN_DECODE: _decoding_s(ended),
            names.E2E: _seconds(ended.arrived_ns, ended.ended_ns),
        }
        return {name: value for name, value in known.items() if value is not None}


def phases_of(ended: EndedRequest) -> Iterator[Phase]:
    """The parts of an attempt that it came to, in order."""
    if ended.side is HandoffSide.RECEIVE:
        yield from _received(ended)
    else:
        yield from _computed(ended)


def _received(ended: EndedRequest) -> Iterator[Phase]:
    transfer, committed = ended.transfer, ended.transferred_ns
    if transfer is None or committed is None:
        yield Phase(names.QUEUE, ended.arrived_ns, ended.ended_ns, _fetched(ended))
        return
    granted = committed - round(transfer.wait_s * 1e9)
    yield Phase(names.QUEUE, ended.arrived_ns, max(granted, ended.arrived_ns))
    yield Phase(names.KV_RECEIVE, granted, committed, _moved(transfer))
    yield Phase(names.DECODE, committed, ended.ended_ns, {names.OUTPUT_TOKENS: ended.output_tokens - 1})


def _computed(ended: EndedRequest) -> Iterator[Phase]:
    if ended.scheduled_ns is None:
        yield Phase(names.QUEUE, ended.arrived_ns, ended.ended_ns, _fetched(ended))
        return
    yield Phase(names.QUEUE, ended.arrived_ns, ended.scheduled_ns, _fetched(ended))
    first = ended.first_token_ns
    yield Phase(names.PREFILL, ended.scheduled_ns, ended.ended_ns if first is None else first, _prompt(ended))
    if ended.transfer is not None and ended.transferred_ns is not None:
        began = ended.transferred_ns - round(ended.transfer.wait_s * 1e9)
        yield Phase(names.KV_SEND, began, ended.transferred_ns, _moved(ended.transfer))
    elif first is not None and ended.output_tokens > 1:
        yield Phase(names.DECODE, first, ended.ended_ns, {names.OUTPUT_TOKENS: ended.output_tokens - 1})


def _prompt(ended: EndedRequest) -> Attributes:
    return {
        names.INPUT_TOKENS: ended.prompt_tokens,
        names.CACHED_TOKENS: ended.cached_tokens or 0,
        **hit_attributes(ended.cache_hits),
    }


def _moved(transfer: TransferReport) -> Attributes:
    return {
        names.TRANSFER_BYTES: transfer.bytes,
        names.TRANSFER_PAGES: transfer.pages,
        names.TRANSFER_REUSED: transfer.pages_reused,
        names.TRANSFER_MS: round(transfer.wait_s * 1e3, 3),
        names.TRANSFER_EXPOSED_MS: round(transfer.exposed_s * 1e3, 3),
    }


def _fetched(ended: EndedRequest) -> Attributes:
    fetch = ended.fetch
    if fetch is None:
        return None
    return {
        names.FETCH_PEER: fetch.peer,
        names.FETCH_PAGES: fetch.pages,
        names.FETCH_BYTES: fetch.bytes,
        names.FETCH_MS: round(fetch.wait_s * 1e3, 3),
    }


def _decoding_s(ended: EndedRequest) -> float | None:
    """None for an attempt that decoded nothing here, such as the sending end of a handoff."""
    return next((_seconds(each.began, each.ended) for each in phases_of(ended) if each.name == names.DECODE), None)


def _seconds(began: int | None, ended: int | None) -> float | None:
    return None if began is None or ended is None else (ended - began) / 1e9
