"""What a worker tells about itself for people to see. Nothing of it takes part in routing.

    1. The worker writes the figures into its readable hash with every heartbeat.
    2. A gateway's view of the fleet keeps them as the text that came.
    3. They are parsed when somebody looks: a fleet that nobody watches costs nothing.

What is read back is untrusted: figures that make no sense are no figures, and the worker is still a worker.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""No further than a browser can count."""
Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
Label = Annotated[str, msgspec.Meta(max_length=64)]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker. Totals count since its start. 0 where its release tells nothing."""

    running: Count = 0
    waiting: Count = 0
    transferring: Count = 0
    inflight: Count = 0
    total_pages: Count = 0
    """Of the KV pool: used by requests, held by the prefix cache alone (evictable), quarantined, or free."""
    free_pages: Count = 0
    evictable_pages: Count = 0
    quarantined_pages: Count = 0
    host_pages: Count = 0
    host_pages_used: Count = 0
    stored_blocks: Count = 0
    prompt_tokens_total: Count = 0
    cached_tokens_total: Count = 0
    """Of the prompt tokens, from whichever tier; the next two are parts of it."""
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
