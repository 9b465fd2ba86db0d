"""Logit edits of requests that no scheduler has: what `EditColumns` makes of them, with rows and histories given."""

from collections.abc import Sequence
from dataclasses import replace

from tandem_engine.forward.logit_edits import LogitEdits
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.finishing import PenaltySlots
from tandem_engine.scheduler.request import Request
from tandem_engine.scheduler.schedule_batch import EditColumns


def make_request(
    row: int, sampling: SamplingParams, *, prompt: Sequence[int] = (1, 2), outputs: Sequence[int] = ()
) -> Request:
    """Admitted to `row`, nothing in flight."""
    req = Request(rid=f"r{row}", origin_input_ids=tuple(prompt), sampling=sampling, output_ids=list(outputs))
    req.kv = RequestKv(row=row, space=BASE_SPACE, page_size=4)
    return req


def make_edits(requests: Sequence[Request], slots: PenaltySlots | None = None) -> LogitEdits:
    """As for a step in which all of them sample for the first time."""
    return EditColumns.of(requests, slots or PenaltySlots()).with_histories() or LogitEdits()


def settled(edits: LogitEdits) -> LogitEdits:
    """As for any later step."""
    return replace(edits, histories=())
