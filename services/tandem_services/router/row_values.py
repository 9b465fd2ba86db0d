"""Values of a worker's readable fields in Redis, each read and bounded. Reading one for routing raises `ValueError`.

`Figures` are for display only: a worker writes them with its description, the view keeps the text, and they are parsed
only when they are displayed. Malformed statistics are dropped without their worker.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Annotated

import msgspec

from tandem_engine.base.addresses import Address
from tandem_engine.config.adapters import MAX_ADAPTERS
from tandem_engine.messages.control import MAX_LINKS, AdapterMemory, ServedAdapter
from tandem_engine.messages.stats import MAX_STEP_S, LinkReport, StepFit

_INCARNATION = re.compile(r"[A-Za-z0-9._-]{1,128}@[0-9]{1,40}")

_DIGITS = re.compile(r"[0-9]{1,9}")
"""Tokens: a field of 32 bits has room for them."""

_DIGEST = re.compile(r"[0-9a-f]{32}")

MOST = 1e18
"""No rate, time or number of tokens that is measured comes near it."""

_Links = Annotated[tuple[LinkReport, ...], msgspec.Meta(max_length=MAX_LINKS)]
_Adapters = Annotated[tuple[ServedAdapter, ...], msgspec.Meta(max_length=MAX_ADAPTERS)]


def read_incarnation(text: str) -> str:
    """`text`, if it is worker_id@number."""
    if _INCARNATION.fullmatch(text) is None:
        raise ValueError(f"{text[:200]!r} is no incarnation")
    return text


def read_endpoint(text: str) -> str:
    """`text`, the endpoint that an engine reports. Anything else would reach ZMQ, which has more transports."""
    if not Address.of_endpoint(text).port:
        raise ValueError(f"{text[:200]!r} has no port")
    return text


def read_http_address(text: str) -> str:
    """`text`, if it is "" or http://HOST:PORT: the order token is sent there."""
    # A URL escapes the % before the zone of an IPv6 address.
    if text and Address.parse(text.removeprefix("http://").replace("%25", "%")).url() != text:
        raise ValueError(f"{text[:200]!r} is not http://HOST:PORT")
    return text


@lru_cache(maxsize=256)
def read_adapters(text: str) -> Mapping[str, ServedAdapter]:
    """By name. Most workers of a fleet have the same, heartbeat after heartbeat."""
    try:
        adapters = msgspec.json.decode(text, type=_Adapters)
    except msgspec.DecodeError as error:
        raise ValueError(f"adapters: {error}") from error
    return {adapter.name: adapter for adapter in adapters}


@lru_cache(maxsize=256)
def read_adapter_memory(text: str) -> AdapterMemory | None:
    """None for a worker that reports none."""
    try:
        return msgspec.json.decode(text, type=AdapterMemory) if text else None
    except msgspec.DecodeError as error:
        raise ValueError(f"adapter_memory: {error}") from error


def read_digest(text: str) -> str:
    """`text`, if it is "" or 32 hexadecimal digits."""
    if text and _DIGEST.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is no digest")
    return text


def read_step_fit(text: str) -> StepFit | None:
    """None for ""."""
    try:
        fit = msgspec.json.decode(text, type=StepFit) if text else None
    except msgspec.DecodeError as error:
        raise ValueError(f"step_fit: {error}") from error
    if fit is not None and not all(0.0 <= seconds <= MAX_STEP_S for seconds in msgspec.structs.astuple(fit)):
        raise ValueError("no step takes so long")
    return fit


def read_links(text: str) -> tuple[LinkReport, ...]:
    """Those of a worker to its peers."""
    try:
        links = msgspec.json.decode(text, type=_Links)
    except msgspec.DecodeError as error:
        raise ValueError(f"links: {error}") from error
    if not all(0.0 <= link.bytes_per_s < inf for link in links):
        raise ValueError("a link has no sensible rate")
    return links


def read_measure(fields: Mapping[str, str], name: str) -> float:
    """A number that was measured."""
    value = float(fields[name])
    if not 0 <= value <= MOST:
        raise ValueError(f"{name} is {value}")
    return value


def read_size(text: str) -> int:
    """A whole number above 0."""
    return int(positive(read_number(text)))


def read_number(text: str) -> int:
    """A whole number."""
    if _DIGITS.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(text)


def positive(value: float) -> float:
    """`value`, if it is above 0."""
    if value <= 0:
        raise ValueError(f"{value} is not positive")
    return value


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
