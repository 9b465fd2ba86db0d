"""Statistics of a worker for display only; routing does not use them.

A worker writes them into its readable hash with its description, the view keeps the text, and they are parsed only when
they are displayed. Malformed statistics are dropped without their worker.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""No further than a browser can count."""

Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
MAX_LABEL = 64
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one worker. Totals count since its start. 0 where its release reports nothing."""

    running: Count = 0
    waiting: Count = 0
    transferring: Count = 0
    inflight: Count = 0
    total_pages: Count = 0
    """Pages of the KV pool: used by requests, held by the prefix cache alone (evictable), quarantined, or free."""
    free_pages: Count = 0
    evictable_pages: Count = 0
    quarantined_pages: Count = 0
    host_pages: Count = 0
    host_pages_used: Count = 0
    stored_blocks: Count = 0
    prompt_tokens_total: Count = 0
    cached_tokens_total: Count = 0
    """Prompt tokens found in any tier of the prefix cache; the next two are parts of it."""
    host_cached_tokens_total: Count = 0
    disk_cached_tokens_total: Count = 0
    output_tokens_total: Count = 0
    output_tokens_per_s: Rate = 0.0
    transfers_total: Count = 0
    transfer_failures_total: Count = 0
    transfer_bytes_total: Count = 0
    fetched_total: Count = 0
    """Prefixes brought from other workers."""
    transport: Label = ""
    dtype: Label = ""
    device: Label = ""
    kernel_target: Label = ""
    """Kind of CPU that its kernels are compiled for; empty on a GPU."""
    tp_size: Count = 0


FIGURES = frozenset(field.name for field in msgspec.structs.fields(Figures))


def kept_figures(fields: Mapping[str, str]) -> dict[str, str | int | float]:
    """The figures of a worker's hash, as they came."""
    return {name: fields[name] for name in FIGURES & fields.keys()}


def read_figures(details: Mapping[str, str | int | float]) -> Figures | None:
    """None for what makes no sense."""
    try:
        return msgspec.convert(dict(details), Figures, strict=False)
    except msgspec.ValidationError:
        return None
