"""A trace as the router gets it: requests with token ids that are a function of the block numbers, and their tenants.

Without a key file every tenant of the trace has weight 1, uses the same cache, and may ask for any priority. With one,
names are those of its entries, and weight, priority and cache are determined by the gateway's own code. Sessions of a
trace are inferred.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_engine.messages.kv_events import TOKEN_BYTES, chain_packed, chain_seed
from tandem_lab.traces import TRACE_BLOCK, TraceRow
from tandem_services.gateway.access.caller import UNKNOWN, Caller
from tandem_services.gateway.access.keys import KeyRing
from tandem_services.gateway.access.tenants import SOLE_TENANT, Tenant


@dataclass(frozen=True, slots=True)
class Admitted:
    """One request's tenant, and what the request gets of what it asked for."""

    tenant: Tenant
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Tenants:
    """Of one trace."""

    keys: KeyRing | None = None
    """None: no keys are required."""

    def admit(self, name: str, priority: int) -> Admitted:
        """Raises `ConfigError` when the key file has no such entry."""
        if self.keys is None:
            tenant = UNKNOWN if name == SOLE_TENANT else Tenant(name=name, sha256=())
            return Admitted(tenant, priority, "")
        holder = next((tenant for tenant in self.keys.tenants if tenant.name == name), None)
        if holder is None:
            names = ", ".join(tenant.name for tenant in self.keys.tenants[:10])
            raise ConfigError(f"--api-keys: no entry for tenant {quoted(name)} of the trace; there are {names}")
        caller = Caller(tenant=holder)
        return Admitted(holder, caller.priority(priority), caller.cache_salt(""))


TOKEN_PERIOD = 8
"""Tokens of a block repeat after as many: the bytes of its number. Small integers, which cost no memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRequest:
    """One request of a run."""

    number: int
    at: float
    """Seconds after the first."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    chain: tuple[bytes, ...]
    """Digests of its whole blocks, as the router computes them."""
    session: str
    """Requests that share more than their first block are taken for one conversation."""
    tenant: Tenant = UNKNOWN
    priority: int = 0
    cache_salt: str = ""
    choices: int = 1
    """Each of `output_tokens`."""
    gateway: int = 0
    """Which one it is sent to, of as many as there are: modulo their number."""

    @property
    def total_output_tokens(self) -> int:
        """Of all choices."""
        return self.output_tokens * self.choices

    def token_ids(self) -> tuple[int, ...]:
        return tuple(_tokens(self.blocks)[: self.prompt_tokens])


def simulated_requests(
    rows: Iterable[TraceRow],
    *,
    limit: int | None,
    speed: float,
    tenants: Tenants | None = None,
    apart: bool = False,
    sessions_apart: bool = False,
) -> list[SimulatedRequest]:
    """In the order of arrival. Gateways get them in turn, or, `apart`, all of a tenant are sent to one, or,
    `sessions_apart`, all of a conversation.

    `speed` divides the times between them. Raises `ConfigError` for an unknown tenant.
    """
    ordered = sorted(islice(rows, limit), key=lambda row: row.at)
    sessions, tenants = _Sessions(), tenants or Tenants()
    homes: dict[str, int] = {}
    admitted = [tenants.admit(row.tenant, row.priority) for row in ordered]
    conversations = [sessions.of(row.blocks) for row in ordered]
    together = apart or sessions_apart
    return [
        SimulatedRequest(
            number=number,
            at=(row.at - ordered[0].at) / speed,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            blocks=row.blocks,
            chain=tuple(_chain(row, whose.cache_salt)),
            session=session,
            tenant=whose.tenant,
            priority=whose.priority,
            cache_salt=whose.cache_salt,
            choices=row.choices,
            gateway=homes.setdefault(whose.tenant.name if apart else session, len(homes)) if together else number,
        )
        for number, (row, whose, session) in enumerate(zip(ordered, admitted, conversations, strict=True))
    ]


def _chain(row: TraceRow, cache_salt: str) -> Iterator[bytes]:
    tokens = _tokens(row.blocks[: row.prompt_tokens // TRACE_BLOCK])
    packed = bytearray(len(tokens) * TOKEN_BYTES)
    packed[::TOKEN_BYTES] = tokens
    yield from chain_packed(packed, TRACE_BLOCK * TOKEN_BYTES, parent=chain_seed(cache_salt))


def _tokens(blocks: Iterable[int]) -> bytes:
    """One byte for each token."""
    return b"".join(block.to_bytes(TOKEN_PERIOD, "little") * (TRACE_BLOCK // TOKEN_PERIOD) for block in blocks)


class _Sessions:
    """Names conversations by the blocks that their requests have in common."""

    def __init__(self) -> None:
        self._of_block: dict[int, str] = {}
        self._count = 0

    def of(self, blocks: tuple[int, ...]) -> str:
        # The first block is the system prompt of all.
        known = next((self._of_block[block] for block in reversed(blocks[1:]) if block in self._of_block), None)
        if known is None:
            self._count += 1
            known = f"conversation-{self._count}"
        for block in blocks[1:]:
            self._of_block.setdefault(block, known)
        return known
