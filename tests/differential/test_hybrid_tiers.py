"""A model with states over device, host memory and storage: whatever leaves and returns, outputs are the same.

The fake model has a wrong token where a state is not that of the tokens before. Pools are small, so that blocks and
states move all the time, and whatever is given out is filled with garbage first where copies run at once.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from tandem_engine.config import HostConfig, PreemptionMode, WritePolicy
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.poisoned_states import poisoned
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

PROMPTS = (tuple(range(1, 60)) * 2, tuple(range(5, 75)), (*range(1, 60), *range(1, 41)), tuple(range(9, 60)) * 3)
"""The first and third share the first 99 tokens."""
ROUNDS = 3
LONG = tuple((*range(1, 60), *range(3, 40)) * 3)[:280]
BRANCHING = tuple(
    (first, *prompt)
    for first in (1, 2)
    for prompt in (LONG, (*LONG[:210], *range(1, 62)), (*LONG[:150], *range(2, 60), *range(2, 60)))
)
"""Two beginnings, each with prompts that leave the first one where no anchor is."""


def engine_of(*, overlap: bool, page_size: int = 4, anchors: int = 2, tokens: int = 240, **settings: object) -> Engine:
    """Room for one request and a half, and for two anchors."""
    return make_engine(
        anchors=anchors,
        enable_overlap=overlap,
        enable_mixed_chunk=True,
        page_size=page_size,
        usable_pages=tokens // page_size,
        chunked_prefill_size=48,
        init_new_token_ratio=0.1,
        max_retractions=1000,
        **settings,
    )


def run_rounds(engine: Engine, *, poison: bool, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> None:
    states = engine.model.states
    assert states is not None
    memory = poisoned(engine.memory, pages=engine.model.pool.bytes_view(), states=states.bytes_view())
    with memory if poison else nullcontext():
        for turn in range(ROUNDS):
            for number, prompt in enumerate(prompts):
                for copy in range(2):
                    tokens = (*prompt, *range(turn))
                    engine.add(make_message(f"{turn}-{number}-{copy}", tokens, max_tokens=6 + number))
                    engine.step(8)
            engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize(("overlap", "page_size"), [(False, 16), (True, 4)])
def test_states_that_return_from_host_memory_are_the_same(policy, overlap, page_size):
    host = HostConfig(enable_cache=True, write_policy=policy)
    engine = engine_of(overlap=overlap, page_size=page_size, host_pages=600 // page_size, host=host)
    run_rounds(engine, poison=not overlap)
    assert engine.scheduler.tally.host_cached_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_host_memory_that_is_short_only_hits_less(overlap):
    host = HostConfig(enable_cache=True)
    run_rounds(engine_of(overlap=overlap, host_pages=20, host=host), poison=not overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_states_that_return_from_storage_are_the_same(overlap):
    storage, host = MemoryStorage(), HostConfig(enable_cache=True)
    engine = engine_of(overlap=overlap, host_pages=50, host=host, storage=storage)
    run_rounds(engine, poison=not overlap)
    assert engine.scheduler.tally.disk_cached_tokens > 0


def test_retracted_and_swapped_requests_find_their_states():
    host = HostConfig(enable_cache=True, swap_bytes=1 << 12)
    engine = engine_of(
        overlap=True, host_pages=400, host=host, force_retract_every=3, preemption_mode=PreemptionMode.SWAP
    )
    run_rounds(engine, poison=False)
    assert engine.scheduler.stats().swapped_in_total > 0


@pytest.mark.parametrize(("overlap", "host_pages"), [(False, 0), (True, 400)])
@pytest.mark.parametrize("disturbed", [False, True])
def test_prompts_that_branch_off_within_a_cached_prompt_have_the_same_output(overlap, disturbed, host_pages):
    """Some continue at provisional states, which make room for others all the time."""
    host = HostConfig(enable_cache=host_pages > 0)
    faults = {"force_retract_every": 5, "force_fault_every": 9} if disturbed else {}
    engine = engine_of(
        overlap=overlap, anchors=6, tokens=1200, host_pages=host_pages, host=host, context_length=400, **faults
    )
    used: list[int] = []
    anchors = engine.memory.anchors
    assert anchors is not None
    with pytest.MonkeyPatch.context() as patch:
        keep = anchors._keep
        patch.setattr(anchors, "_keep", lambda page: used.append(page) or keep(page))
        run_rounds(engine, poison=not overlap, prompts=BRANCHING)
    assert used
    assert anchors.counts.replaced > 0
