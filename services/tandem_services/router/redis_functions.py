"""The Redis Function library: one source built from `scripts/`, named after a digest of its content.

1. The source consists of the constants of `keys`, `cost` and `scoring`, then the scripts in order of dependency.
2. Library and function names contain the digest, so that gateways and workers of two releases work on the same keys
   during a rollout, each with its own functions.
3. The first caller loads the library, and any caller that finds it missing (after Redis lost its data) loads it again.
   A Redis user without FUNCTION LOAD needs an administrator to load it: `library_source()` returns the source.
"""

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.resources import files
from typing import TypeVar

import msgspec

from tandem_services.common.redis_client import (
    Argument,
    FunctionMissingError,
    RedisClient,
    Reply,
    UnreadableReplyError,
    decoded,
)
from tandem_services.router import cost, in_flight, keys, scoring, usage_counters
from tandem_services.router import cost as shortlist

T = TypeVar("T")

SCRIPTS = (
    "clock",
    "state",
    "changes",
    "fleet_row",
    "open",
    "in_flight",
    "chain",
    "score",
    "worker",
    "fleet",
    "ranks",
    "holders",
    "sweep_ranks",
    "index",
    "lease",
    "fetch",
    "settle",
    "option",
    "candidates",
    "route",
    "summary",
    "usage",
    "fair",
    "adapters",
    "starting",
)

SCOPED: Mapping[str, tuple[str, ...]] = {
    "in_flight": ("note_prompt", "take_back_notes", "drop_notes_of", "drop_indexed_notes", "blocks_in_flight"),
    "chain": ("chain_search",),
    "ranks": ("ranked", "model_of", "rank_keys", "kinds_key", "rank", "unrank", "keep_ranks", "row_changed"),
    "holders": (
        "sampling_of",
        "tag_of",
        "bucket_of",
        "read_holders",
        "add_holder",
        "drop_holder",
        "change_holders",
        "note_publisher",
        "named_by",
        "forget_gone",
        "publishes",
        "drop_tag",
        "sweep_holders",
    ),
    "lease": (),
    "candidates": ("candidates",),
    "summary": (),
    "usage": (),
    "fair": (),
    "adapters": (),
    "starting": (),
}
"""Scripts with few functions that others use: their other names are local to them, because a Lua chunk has room for
200. So is a constant that one of them uses alone."""

CONSTANTS: Mapping[str, float] = {
    "LEASE_MS": keys.LEASE_MS,
    "FENCE_AFTER_MS": keys.FENCE_AFTER_MS,
    "FENCED_MEMORY_MS": keys.FENCED_MEMORY_MS,
    "INDEX_TTL_MS": keys.INDEX_TTL_MS,
    "FLEET_TTL_MS": keys.FLEET_TTL_MS,
    "RESERVATION_MS": keys.RESERVATION_MS,
    "RESERVATION_BUCKET_MS": keys.RESERVATION_BUCKET_MS,
    "SWEEP_EVERY_MS": keys.SWEEP_EVERY_MS,
    "SWEEP_STEP": keys.SWEEP_STEP,
    "NOTED_EVERY_MS": keys.NOTED_EVERY_MS,
    "SWEPT_BUCKETS": keys.SWEPT_BUCKETS,
    "SWEPT_FIELDS": keys.SWEPT_FIELDS,
    "SWEPT_TAGS": keys.SWEPT_TAGS,
    "MAX_BUCKET_FIELDS": keys.MAX_BUCKET_FIELDS,
    "MAX_HOLDERS": keys.MAX_HOLDERS,
    "TAG_BYTES": keys.TAG_BYTES,
    "MAX_SAMPLING": keys.MAX_SAMPLING,
    "HOLDER_TOKENS": keys.HOLDER_TOKENS,
    "RANK_AGAIN_MS": keys.RANK_AGAIN_MS,
    "ALL_UP_TO": keys.ALL_UP_TO,
    "MIXED_UP_TO": keys.MIXED_UP_TO,
    "MET_HOLDERS": keys.MET_HOLDERS,
    "MORE_DECODES": keys.MORE_DECODES,
    "RANKED_TOKENS": keys.RANKED_TOKENS,
    "MAX_RANKED_PAGE": keys.MAX_RANKED_PAGE,
    "MAX_WORKERS": keys.MAX_WORKERS,
    "MAX_REGISTERED": keys.MAX_REGISTERED,
    "DESCRIBED_TTL_MS": keys.DESCRIBED_TTL_MS,
    "MAX_CHANGES": keys.MAX_CHANGES,
    "MAX_ROW_FIELDS": keys.MAX_ROW_FIELDS,
    "MAX_NAMED_BLOCKS": keys.MAX_NAMED_BLOCKS,
    "DIGEST_BYTES": keys.DIGEST_BYTES,
    "MAX_NOTES": in_flight.MAX_NOTES,
    "NOTES_OF_DECISION": in_flight.NOTES_OF_DECISION,
    "EXPIRY_FACTOR": in_flight.EXPIRY_FACTOR,
    "EXPIRY_SLACK_MS": in_flight.EXPIRY_SLACK_MS,
    "BACKLOG_MS": keys.BACKLOG_MS,
    "QUEUE_HEAD_TTL_MS": keys.QUEUE_HEAD_TTL_MS,
    "YIELDED_SLOT_TTL_MS": keys.YIELDED_SLOT_TTL_MS,
    "STARTING_MS": keys.STARTING_MS,
    "MAX_STARTING": keys.MAX_STARTING,
    "MAX_GATEWAYS": keys.MAX_GATEWAYS,
    "MAX_PLACES": keys.MAX_PLACES,
    "USAGE_WINDOW_S": usage_counters.WINDOW_S,
    "MAX_TENANTS": usage_counters.MAX_TENANTS,
    "HANDOFF_S": cost.HANDOFF_S,
    "NO_ROOM_S": cost.NO_ROOM_S,
    "BROKEN_TOKEN_S": cost.BROKEN_TOKEN_S,
    "COMING": cost.COMING,
    "FOLLOWERS": cost.FOLLOWERS,
    "COPY_FOLLOWERS": cost.COPY_FOLLOWERS,
    "FETCH_S": cost.FETCH_S,
    "FETCH_TURNS": cost.FETCH_TURNS,
    "TURN_TOKENS": cost.TURN_TOKENS,
    "PAIR_ENDS": shortlist.PAIR_ENDS,
    "TIE_S": scoring.TIE_S,
}


@dataclass(frozen=True, slots=True)
class LibrarySource:
    """What FUNCTION LOAD takes, and the name it declares."""

    name: str
    text: str


def library_source(constants: Mapping[str, float] = CONSTANTS, *, clock: str | None = None) -> LibrarySource:
    """The library, named `tandem_` and eight hex digits of its content's digest.

    `clock` takes the place of scripts/clock.lua, where time is not Redis's own.
    """
    scripts = {name: _script(name) for name in SCRIPTS}
    if clock is not None:
        scripts["clock"] = clock
    words = {name: _words(script) for name, script in scripts.items()}
    users = {each: [name for name in SCRIPTS if each in words[name]] for each in constants}
    alone = {each: names[0] for each, names in users.items() if len(names) == 1 and names[0] in SCOPED}
    parts = [_constants(constants, constants.keys() - alone.keys())]
    for name, script in scripts.items():
        own = _constants(constants, {constant for constant, user in alone.items() if user == name})
        parts.append(_scoped(name, own, script) if name in SCOPED else script)
    body = "\n".join(parts)
    name = "tandem_" + blake2b(body.encode(), digest_size=4).hexdigest()
    return LibrarySource(name, f"#!lua name={name}\nlocal VERSION = '{name}'\n{body}")


@functools.cache
def _script(name: str) -> str:
    return (files("tandem_services.router") / "scripts" / f"{name}.lua").read_text("utf-8")


@functools.lru_cache(2 * len(SCRIPTS))
def _words(script: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", script))


def _constants(values: Mapping[str, float], names: Collection[str]) -> str:
    return "\n".join(f"local {name} = {value}" for name, value in values.items() if name in names)


def _scoped(name: str, constants: str, script: str) -> str:
    """`script` in a block of its own, beyond which only its functions in `SCOPED` are known."""
    functions = SCOPED[name]
    for function in functions:
        script = script.replace(f"\nlocal function {function}(", f"\nfunction {function}(")
    declared = f"local {', '.join(functions)}\n" if functions else ""
    return f"{declared}do\n{constants}\n{script}\nend"


@dataclass(frozen=True, slots=True)
class FunctionLibrary:
    """Calls functions of the library, and loads it where it is missing.

    All methods raise `RedisUnavailableError` when Redis does not answer in time or refuses.
    """

    client: RedisClient
    source: LibrarySource = field(default_factory=library_source)

    async def load(self) -> None:
        await self.client.command("FUNCTION", "LOAD", "REPLACE", self.source.text)

    async def call(self, function: str, keys: tuple[str, ...], *args: Argument) -> Reply:
        """FCALL; a missing library is loaded and the call repeated once."""
        fcall = ("FCALL", f"{self.source.name}_{function}", len(keys), *keys, *args)
        try:
            return await self.client.command(*fcall)
        except FunctionMissingError:
            await self.load()
        return await self.client.command(*fcall)

    async def ask(self, function: str, keys: tuple[str, ...], *args: Argument, shape: type[T]) -> T:
        """As `call`, of a function that answers with msgpack. Raises `UnreadableReplyError` if it is not of `shape`."""
        reply = await self.call(function, keys, *args)
        try:
            return decoded(reply, lambda data: msgspec.msgpack.decode(data, type=shape))
        except ValueError as error:
            raise self.unreadable(function, error) from error

    def unreadable(self, function: str, reason: object) -> UnreadableReplyError:
        """See `RedisClient.unreadable`."""
        return self.client.unreadable(f"the answer of {function}", reason)
