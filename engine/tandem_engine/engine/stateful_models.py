"""Models whose layers keep states: what an engine does not do with them, and how many states it has memory for.

A state is that of one length of one sequence: a step cannot be taken back in it. Our own layers therefore leave a state
as it is in a step with drafts, and move it on when it is known how many are accepted (`memory.state_pool.DraftedRuns`).
The code of transformers does not, so drafts for its models with states are rejected when the engine starts.

Each request that runs has a state, and with a prefix cache there is room for as many anchors (`state_anchors`). Where
the memory is given by its size, requests of a usual length get pages and states. Fewer may run than
--max-running-requests then: the others wait for a row.
"""

import logging
from typing import NamedTuple

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import EngineConfig, ModelConfig
from tandem_engine.memory.group_pools import TYPICAL_TOKENS, Demand
from tandem_engine.memory.sizing import GIB, MIN_POOL, MemoryPlan
from tandem_engine.memory.state_pool import PartedSpec, StatePool, StateSpec
from tandem_engine.model.layers.delta import bytes_until_verified

logger = logging.getLogger(__name__)


def require_supported(facts: ModelConfig, config: EngineConfig) -> None:
    """Raise `ConfigError`, naming the flag, unless an engine of `config` serves a model of `facts`."""
    reason = unsupported(facts, config)
    if reason is not None:
        raise ConfigError(f"{facts.family}: {reason}")


def unsupported(facts: ModelConfig, config: EngineConfig) -> str | None:
    """What of `config` does not go with layers that keep states; None where all does, or there are none."""
    algorithm = config.speculative.algorithm
    if facts.state_parts and algorithm is not None:
        return (
            "transformers computes its states, which rejected drafts would change: leave out "
            f"--speculative-algorithm {algorithm}"
        )
    return None


def drafted_bytes(spec: StateSpec | PartedSpec | None, config: EngineConfig) -> int:
    """What states take besides in the largest step with drafts, by `--speculative-disable-by-batch-size` too."""
    if not isinstance(spec, StateSpec) or config.speculative.algorithm is None:
        return 0
    running, bound = config.scheduler.max_running_requests, config.speculative.disable_by_batch_size
    tokens = 1 + config.speculative.num_draft_tokens
    return bytes_until_verified(spec, sequences=min(running, bound or running), tokens=tokens)


SPARE_ROWS = 8
"""Of requests that ended while a step in flight still had them in it: others start in the meantime."""


class StateShares(NamedTuple):
    """Of the memory for KV."""

    pages: int
    """The dummy page included."""
    rows: int
    """Requests that have a state."""
    anchors: int
    """States at which cached prefixes can be continued."""


def state_shares(plan: MemoryPlan, spec: StateSpec | PartedSpec, demand: Demand, config: EngineConfig) -> StateShares:
    """Divide what was planned for pages alone; `--num-pages` is kept, and states lie beside those pages.

    Raises:
        ConfigError: not even one request has room, or states do not fit next to the pages.
    """
    running = config.scheduler.max_running_requests
    wanted, each = running + min(running, SPARE_ROWS), 2 if config.cache.enable_prefix_cache else 1
    if config.cache.num_pages:
        # As pages do, states on a CPU come before the ring.
        free = plan.free + (plan.facts.ring if plan.beside_pool else 0)
        needed = (1 + each * wanted) * spec.slot_bytes
        if needed > free:
            fitting = _running_with(max(0, free // spec.slot_bytes - 1) // each)
            raise ConfigError(
                f"--max-running-requests {running} needs {_gib(needed)} for states next to --num-pages {plan.pages}, "
                f"and {_gib(free)} is available: {f'lower it to at most {fitting}, or ' if fitting else ''}"
                "lower --num-pages"
            )
        return StateShares(pages=plan.pages, rows=wanted, anchors=(each - 1) * wanted)
    states, left = each * spec.slot_bytes, plan.kv_bytes - spec.slot_bytes
    usual = demand.blocks(min(demand.context_length, TYPICAL_TOKENS)) * plan.page_bytes + states
    longest = (demand.blocks(demand.context_length) + 1) * plan.page_bytes
    # As many of the usual length as have room, and pages for one of the context length.
    rows = min(wanted, max(1, left // usual), max(1, (left - longest) // states))
    pages = (left - rows * states) // plan.page_bytes
    if pages < MIN_POOL:
        raise ConfigError(
            f"one request needs {_gib(MIN_POOL * plan.page_bytes + spec.slot_bytes + states)} for KV pages and "
            f"states, and the memory for KV is {_gib(plan.kv_bytes)}: raise --kv-cache-gib or --mem-fraction-static"
        )
    if rows < running:
        logger.warning("memory for states lets %d requests run at once, not %d", rows, running)
    return StateShares(pages=pages, rows=rows, anchors=(each - 1) * rows)


def _running_with(rows: int) -> int:
    """The most requests that may run where so many have a state."""
    return max(rows - SPARE_ROWS, rows // 2)


def log_states(states: StatePool, facts: ModelConfig, pages: int) -> None:
    """One line on what they take, next to so many KV pages."""
    logger.info(
        "%d of %d layers keep states of %.1f MiB a request: %.2f GiB for %d requests and %d anchors; %d KV pages",
        states.spec.layers,
        facts.num_layers,
        states.spec.slot_bytes / (1 << 20),
        states.total_bytes / GIB,
        states.rows,
        len(states.anchor_slots),
        pages,
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
