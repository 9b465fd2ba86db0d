"""The cost model of the router: the predicted cost of a candidate, in seconds. Pure.

`scripts/score.lua` implements the same in Redis. Local routing uses this module; a property test keeps both equal.

    prefix_fetch     cost of a cached prefix from another worker beyond its queue, where a fetch is cheaper: messages +
                     iterations of the other's loop + missing KV bytes / rate of the link
    host_load        prompt tokens cached only in host memory × seconds to copy one to the device
    prefill_queue    tokens queued and reserved / prefill rate of the worker that computes the prompt
    prefill_compute  prompt tokens that are not cached or fetched, at least one / prefill rate
    prefill_stall    (prefill_compute + host_load) × the sequences that wait for them: those decoding on that worker; on
                     a decode worker one that will arrive; everywhere those that arrive later (FOLLOWERS). For fetched
                     tokens only those whose blocks they evict from the cache (COPY_FOLLOWERS)
    transfer         for a pair: handoff messages + KV bytes that the decode worker lacks / rate of the link
    adapter_load     seconds to load an adapter that the worker does not have, beyond its queue, and to load again what
                     makes way for it; for a pair also of the decode worker, beyond queue and compute of the other
    decode_load      (sequences there + reserved) × step time: what one more sequence costs the others
    decode_room      NO_ROOM_S if the sequence would have to wait for others to end

A candidate is a pair, with all terms, or a single worker, without a transfer. Fetching or recomputing a prefix, and
computing a prompt remotely or locally, are therefore one comparison: the lowest sum. Rates describe additional tokens,
because the fixed cost of a step is the same wherever the prompt is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import msgspec

from tandem_engine.config import Role
from tandem_engine.messages.stats import StepFit
from tandem_services.router.decision import Absence, WorkerView

ASSUMED_PREFILL_RATE = 2_000.0
"""Tokens per second of a worker that has published no rate: a slow one, so that it is tried but not flooded."""

ASSUMED_TRANSFER_RATE = 1e9
"""Bytes per second of a worker that has measured no link: a plain 10 Gbit/s network."""

HANDOFF_S = 0.002
"""Grant, handoff record and commit of one transfer, whatever its size. Keeps a worker that can do both from
handing over for nothing."""

FETCH_S = 0.004
"""Question, answer and proof of one prefix fetch, whatever its size."""

FETCH_TURNS = 2
"""Iterations of the source's loop: one receives the request, another the completion of the writes."""

TURN_TOKENS = 512
"""Prompt tokens that a worker computes in one turn at most: a chunk."""

NO_ROOM_S = 5.0
"""Assumed wait for running sequences to end. Large against any other term, so that a worker with room is
preferred, and finite, so that the choice among full workers is still by price."""

BROKEN_TOKEN_S = 1.0
"""Seconds per token over a link whose last write failed: dearer than computing anything again, and finite."""

COMING = 1
"""Sequences that a decode worker is expected to get while it computes a prompt. It is there to decode, so even an idle
one computes only what is over sooner than a handoff."""

FOLLOWERS = 3
"""Requests that computing keeps waiting later, wherever it is done: the next ones there, and those whose blocks leave
that cache for a second copy of what another worker has. Found by `tandem simulate`: without it a cached prefix is left
for any shorter queue, and the copies push each other out (docs/benchmarks.md)."""

COPY_FOLLOWERS = 2
"""Followers that are charged for a fetched prefix: it is not computed, but it is a second copy."""


PRESENT = Absence(0.0, 0.0)


@dataclass(kw_only=True, slots=True)
class Load:
    """What one worker has to do: its own report plus what was reserved since."""

    queue_tokens: float = 0.0
    prefill_rate: float = ASSUMED_PREFILL_RATE
    sequences: float = 0.0
    step_s: float = 0.0
    room_tokens: float = 0.0
    max_sequences: float = 1.0
    token_bytes: float = 0.0
    transfer_rate: float = ASSUMED_TRANSFER_RATE
    """Bytes per second of its writes to a peer for which it has no figure: the median of those it has."""
    host_token_s: float = 0.0
    """Seconds to copy one token's KV back from host memory; 0 where that has not been measured, or there is none."""
    step_base_s: float = 0.0
    """What a step takes whatever it computes; 0 where that has not been measured. Of no price, as the next two."""
    step_fit: StepFit | None = None
    """Duration of a step that decodes, as the worker has fitted it."""
    kv_tokens: float = 0.0
    """Context of the sequences that it has."""

    def with_work(self, *, queue_tokens: float, sequences: float) -> "Load":
        """The same worker with this to do. A decision makes ten: `dataclasses.replace` takes four times as long."""
        return Load(
            queue_tokens=queue_tokens,
            prefill_rate=self.prefill_rate,
            sequences=sequences,
            step_s=self.step_s,
            room_tokens=self.room_tokens,
            max_sequences=self.max_sequences,
            token_bytes=self.token_bytes,
            transfer_rate=self.transfer_rate,
            host_token_s=self.host_token_s,
            step_base_s=self.step_base_s,
            step_fit=self.step_fit,
            kv_tokens=self.kv_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The demand of one request."""

    prompt_tokens: int
    output_tokens: int
    """Output tokens to keep room for."""
    local_prefill_tokens: int
    """Most tokens that a decode worker may compute itself while a prefill worker lives; 0 for none."""


def uncached(matched: int, demand: Demand) -> int:
    """Prompt tokens to compute where `matched` are cached; at least one always is."""
    return max(1, demand.prompt_tokens - matched)


def room_needed(demand: Demand) -> int:
    """Token slots a decode worker needs to take the request."""
    return demand.prompt_tokens + demand.output_tokens


def prefill_queue_s(load: Load) -> float:
    return load.queue_tokens / load.prefill_rate


def prefill_compute_s(load: Load, matched: int, demand: Demand) -> float:
    return uncached(matched, demand) / load.prefill_rate


def host_load_s(load: Load, tokens: int) -> float:
    """To bring `tokens` cached tokens from host memory back to the device. Forwards wait for it as for computing."""
    return tokens * load.host_token_s


def copy_s(load: Load, tokens: int) -> float:
    """Cost of recomputing what a second copy of `tokens` tokens evicts from the worker's cache."""
    return tokens / load.prefill_rate * COPY_FOLLOWERS


def waiting_sequences(load: Load, role: Role) -> float:
    """Sequences that a prompt computed on this worker keeps waiting."""
    match role:
        case Role.PREFILL:
            return FOLLOWERS
        case Role.DECODE:
            return load.sequences + COMING + FOLLOWERS
        case Role.BOTH:
            return load.sequences + FOLLOWERS


def token_s(load: Load, bytes_per_s: float | None) -> float:
    """Seconds to move one token's KV from a worker over a link: None if it has no figure, 0 if the link is broken."""
    if bytes_per_s is None:
        return load.token_bytes / load.transfer_rate
    return min(load.token_bytes / bytes_per_s, BROKEN_TOKEN_S) if bytes_per_s > 0.0 else BROKEN_TOKEN_S


def turn_s(load: Load) -> float:
    """Time until a worker polls its messages again, at most."""
    decode = load.step_s if load.sequences > 0 else 0.0
    return min(load.queue_tokens, TURN_TOKENS) / load.prefill_rate + decode


def fetch_overhead_s(source: Load) -> float:
    """Of a fetch from the worker whose load is `source`, before it brings any KV."""
    return FETCH_S + FETCH_TURNS * turn_s(source)


def fetch_wait_s(seconds: float, load: Load) -> float:
    """Seconds of a fetch to a worker that exceed its queue: while the fetch lasts, the queue gets shorter."""
    return max(0.0, seconds - prefill_queue_s(load))


def transfer_s(token_seconds: float, matched: int, demand: Demand) -> float:
    """To a decode worker that has `matched` tokens; at least one always moves."""
    return HANDOFF_S + uncached(matched, demand) * token_seconds


def absent_adapter_s(absence: Absence, hidden_s: float) -> float:
    """Of a worker that loads an adapter, in the first `hidden_s` seconds of which other work is done anyway."""
    return max(0.0, absence.load_s - hidden_s) + absence.evict_s


def decode_load_s(load: Load) -> float:
    return load.sequences * load.step_s


def decode_room_s(load: Load, demand: Demand) -> float:
    full = load.sequences >= load.max_sequences or room_needed(demand) > load.room_tokens
    return NO_ROOM_S if full else 0.0


class PricedFetch(msgspec.Struct, frozen=True, kw_only=True):
    """A cached prefix that another worker would send before this one computes."""

    source: WorkerView
    tokens: int
    """Prompt tokens that the source has cached."""
    seconds: float


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that may serve."""

    view: WorkerView
    load: Load
    matched: int
    """Prompt tokens in its prefix cache, in device or host memory."""
    in_host: int = 0
    """Tokens of `matched` that are in host memory alone."""
    in_flight: int = 0
    """Tokens of `matched` that a prompt in flight will leave there. They are not computed again, and not fetched."""
    links: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Bytes per second of its writes by the receiver's incarnation; 0 for a broken link."""
    fetch: PricedFetch | None = None
    """What it had better fetch if it computes the prompt."""
    absence: Absence = PRESENT
    """Of the adapter of the request."""

    @property
    def held(self) -> int:
        """Prompt tokens in its prefix cache now."""
        return self.matched - self.in_flight

    @property
    def known(self) -> int:
        """Prompt tokens that it need not compute."""
        return self.matched if self.fetch is None else self.fetch.tokens


PAIR_ENDS = 4
"""Prefill workers and decode workers of which every pair is priced, and workers that a prefix may be fetched from."""

T = TypeVar("T")


def shortlist(entries: Sequence[T], costs: Sequence[float], random: Random) -> Sequence[T]:
    """The `PAIR_ENDS` cheapest; which of equals is left to chance."""
    if len(entries) <= PAIR_ENDS:
        return entries
    order = sorted(range(len(entries)), key=lambda index: (costs[index], random.random()))
    return [entries[index] for index in order[:PAIR_ENDS]]
