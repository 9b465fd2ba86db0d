"""The prefix index in Redis: workers publish their cached blocks, gateways query the best choice.

An update names the revision that it builds on (scripts/index.lua). `route` matches, scores, chooses and reserves in one
round trip (scripts/route.lua).

`prompt_chain` computes the digests of a prompt's blocks. Each depends on the one before it, at 0.6 µs a block: a
millisecond for 32k tokens. It yields to the event loop after each slice, and `LastChain` avoids hashing a prompt again
that is waiting for capacity.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace, chain_hashes
from tandem_services.router.cost import Demand
from tandem_services.router.decision import (
    EXPLAINED_OPTIONS,
    Absence,
    Claim,
    PricedOption,
    PricedOptions,
    PricedPrefix,
    Reservation,
    ScoreTerm,
)
from tandem_services.router.in_flight import named_blocks
from tandem_services.router.keys import DIGEST_BYTES, HOLDER_TOKENS, MAX_SAMPLING, Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.registry import model_digest

SLICE_BLOCKS = 512
"""Hashed in a third of a millisecond."""


async def prompt_chain(token_ids: Sequence[int], page_size: int, *, space: CacheSpace, most_blocks: int) -> list[bytes]:
    """Digests of the first whole pages of a prompt, at most `most_blocks`."""
    blocks = min(len(token_ids) // page_size, most_blocks)
    chain: list[bytes] = []
    parent = space.seed
    for first in range(0, blocks, SLICE_BLOCKS):
        if first:
            await asyncio.sleep(0)
        last = min(first + SLICE_BLOCKS, blocks)
        chain += chain_hashes(token_ids[first * page_size : last * page_size], page_size, parent=parent)
        parent = chain[-1]
    return chain


@dataclass(slots=True)
class LastChain:
    """`prompt_chain` that keeps what it has computed last."""

    _token_ids: Sequence[int] = ()
    _hashed_as: tuple[int, CacheSpace, int] = (0, BASE_SPACE, 0)
    _chain: list[bytes] = field(default_factory=list)

    async def of(self, token_ids: Sequence[int], page_size: int, *, space: CacheSpace, most_blocks: int) -> list[bytes]:
        """As `prompt_chain`; not to be changed, nor are `token_ids`, which are known by their identity."""
        hashed_as = (page_size, space, most_blocks)
        if token_ids is self._token_ids and hashed_as == self._hashed_as:
            return self._chain
        chain = await prompt_chain(token_ids, page_size, space=space, most_blocks=most_blocks)
        self._token_ids, self._hashed_as, self._chain = token_ids, hashed_as, chain
        return chain


def sampling_of(page_size: int) -> int:
    """Of so many blocks of `page_size` tokens the index by block has one: a power of 2, at most 128, as in
    scripts/holders.lua."""
    every = 1
    while every < MAX_SAMPLING and 2 * every * page_size <= HOLDER_TOKENS:
        every *= 2
    return every


def is_sampled(digest: bytes, page_size: int) -> bool:
    return digest[-1] % sampling_of(page_size) == 0


class UpdateKind(StrEnum):
    """First byte of an event on its way to the index."""

    STORED = "S"
    REMOVED = "R"
    CLEARED = "C"
    HOST_ALONE = "H"
    """What is stored is in host memory, and not on the device."""
    ON_DEVICE = "D"
    """Blocks that were in host memory alone no longer are: they are on the device, or dropped."""
    NAMED_AGAIN = "N"
    """Blocks that have been stored for some time: for the index by block alone, of which Redis may have lost a part."""


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """Blocks that entered or left one worker's prefix cache."""

    kind: UpdateKind
    hashes: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        return self.kind.encode("ascii") + b"".join(self.hashes)


class Applied(StrEnum):
    """How the index took an update."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """It had been applied before: an answer got lost. As good as applied."""
    GAP = "gap"
    """The index does not stand where the update starts. Publish everything again, beginning with CLEARED."""


class _RouteReply(msgspec.Struct, frozen=True, kw_only=True):
    class Made(msgspec.Struct, frozen=True):
        bucket: int
        note: int
        claims: tuple[tuple[str, int, int, int], ...]

    class Option(msgspec.Struct, frozen=True, kw_only=True):
        decode: str
        prefill: str | None = None
        degraded: bool
        matched: int
        in_host: int
        decode_matched: int
        decode_in_host: int
        fetch: tuple[str, int, float] | None = None
        terms: dict[str, float]

        def priced(self) -> PricedOption:
            return PricedOption(
                decode=self.decode,
                prefill=self.prefill,
                predicted_s=sum(self.terms.values()),
                terms=_terms(self.terms),
                matched_tokens=self.matched,
                matched_host_tokens=self.in_host,
                decode_matched_tokens=self.decode_matched,
                decode_matched_host_tokens=self.decode_in_host,
                fetch=None if self.fetch is None else PricedPrefix(*self.fetch),
            )

    status: str
    dropped: int
    chosen: Option | None = None
    passed_over: tuple[tuple[Option, ...], int] | None = None
    reservation: Made | None = None

    def priced(self) -> PricedOptions | None:
        if self.chosen is None or self.passed_over is None:
            return None
        others, more = self.passed_over
        dearer = sorted((option.priced() for option in others), key=lambda option: option.predicted_s)
        return PricedOptions(options=(self.chosen.priced(), *dearer), more=more)


def _terms(seconds: dict[str, float]) -> tuple[ScoreTerm, ...]:
    return tuple(ScoreTerm(name, seconds[name]) for name in sorted(seconds))


class RoutedFetch(NamedTuple):
    """A prefix that the computing worker had better fetch."""

    source: str
    """Incarnation."""
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """A choice by incarnations, which `Membership` resolves."""

    decode: str
    prefill: str | None
    degraded: bool
    """The decode worker computes the prompt because no prefill worker can."""
    matched_tokens: int
    fetch: RoutedFetch | None
    terms: tuple[ScoreTerm, ...]
    priced: PricedOptions | None
    """The options it was chosen from, if they were requested."""
    reservation: Reservation


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockIndex:
    """Calls the index functions. All methods raise `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys

    async def apply(
        self, incarnation: str, updates: Sequence[IndexUpdate], *, page_size: int, builds_on: int, revision: int
    ) -> Applied:
        """Apply `updates` in order. A CLEARED first makes `builds_on` irrelevant. `page_size`: tokens of a block."""
        reply = await self.library.call(
            "apply_kv_events",
            (self.keys.blocks(incarnation), self.keys.cursor(incarnation), self.keys.host_blocks(incarnation)),
            self.keys.prefix,
            incarnation,
            page_size,
            builds_on,
            revision,
            *(update.pack() for update in updates),
        )
        with suppress(ValueError):
            if isinstance(reply, bytes):
                return Applied(reply.decode("ascii"))
        raise self.library.unreadable("apply_kv_events", repr(reply))

    async def route(
        self,
        *,
        model: str,
        demand: Demand,
        page_size: int,
        chain: bytes,
        exclude: frozenset[str],
        allowed: frozenset[str] | None = None,
        absences: Mapping[str, Absence] | None = None,
        seed: int,
        explained: bool = False,
    ) -> Routed | None:
        """Choose and reserve; None when no live worker qualifies.

        `chain`: 16-byte digests of the prompt's pages. `allowed`: if not None, no other worker qualifies. `absences`:
        of workers that have to load the adapter, by incarnation. `explained`: also return the options that were priced.
        """
        if allowed is not None and not allowed:
            return None
        reply = await self.library.ask(
            "route_and_reserve",
            self.keys.shared,
            self.keys.prefix,
            model_digest(model),
            demand.prompt_tokens,
            demand.output_tokens,
            page_size,
            demand.local_prefill_tokens,
            seed,
            named_blocks(chain),
            len(chain) // DIGEST_BYTES,
            EXPLAINED_OPTIONS - 1 if explained else 0,
            len(absences or {}),
            *(part for each in (absences or {}).items() for part in (each[0], repr(each[1][0]), repr(each[1][1]))),
            0 if allowed is None else len(allowed),
            *sorted(allowed or ()),
            *exclude,
            shape=_RouteReply,
        )
        if reply.reservation is None or reply.chosen is None:
            return None
        return Routed(
            decode=reply.chosen.decode,
            prefill=reply.chosen.prefill,
            degraded=reply.chosen.degraded,
            matched_tokens=reply.chosen.matched,
            fetch=None if reply.chosen.fetch is None else RoutedFetch(*reply.chosen.fetch),
            terms=_terms(reply.chosen.terms),
            priced=reply.priced(),
            reservation=Reservation(
                reply.reservation.bucket,
                tuple(Claim(*claim) for claim in reply.reservation.claims),
                note=reply.reservation.note,
            ),
        )

    async def release(self, *reservations: Reservation) -> None:
        """Take back what `route` reserved, before it expires by itself; in one call."""
        parts: list[str | int] = []
        for reservation in reservations:
            if reservation.bucket is None:
                continue
            parts += (reservation.bucket, reservation.note, len(reservation.claims))
            for claim in reservation.claims:
                parts += (claim.incarnation, claim.queue_tokens, claim.sequences, claim.room_tokens)
        if parts:
            await self.library.call("release", self.keys.shared, self.keys.prefix, *parts)
