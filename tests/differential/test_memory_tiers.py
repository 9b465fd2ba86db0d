"""Whether KV stayed on the device, went to host memory or to files and came back, the output is the same.

The fake model reads its KV, so a page that came back wrong, late, or into a page that another request was given
in the meantime becomes a wrong token. Pools are small, so that everything moves all the time; in overlap mode copies
run as late as can be.
"""

from itertools import product

import pytest
from msgspec import structs

from tandem_engine.config import HostConfig, PreemptionMode, WritePolicy
from tandem_engine.messages.outputs import CacheHits
from tandem_engine.messages.requests import GenerateRequest, SessionRef
from tandem_testing.disagg_pair import make_pair
from tandem_testing.fake_executors import ThreadedExecutor
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

PAGE_SIZES = (1, 4, 16)
MODES = [*product((False, True), (False, True), PAGE_SIZES)]
"""Overlap, MIXED, page size."""
PROMPTS = (tuple(range(10, 75)), tuple(range(40, 90)), (*range(10, 43), *range(1, 30)), tuple(range(5, 69)))
"""Four pages of sixteen tokens and a bit; the first and third share two of them."""


def name(mode: tuple[bool, bool, int]) -> str:
    overlap, mixed, page = mode
    return f"{'overlap' if overlap else 'normal'}-{'mixed' if mixed else 'separate'}-page{page}"


def conversations(rounds: int = 3) -> list[list[GenerateRequest]]:
    """Every prompt twice in a row, and again in each round, a little longer: by then its prefix left the device."""
    return [
        [
            make_message(
                f"round{turn}-{number}-{duplicate}",
                [*prompt, *range(turn + duplicate)],
                max_tokens=6 + number,
                temperature=0.8 if number == 1 else 0.0,
                seed=number,
            )
            for number, prompt in enumerate(PROMPTS)
            for duplicate in range(2)
        ]
        for turn in range(rounds)
    ]


def engine_of(mode: tuple[bool, bool, int], *, pages: int = 144, **settings: object) -> Engine:
    """`pages`: tokens that the device can hold; enough for one request and a half."""
    overlap, mixed, page_size = mode
    return make_engine(
        enable_overlap=overlap,
        enable_mixed_chunk=mixed,
        page_size=page_size,
        usable_pages=pages // page_size,
        chunked_prefill_size=24,
        init_new_token_ratio=0.1,
        max_retractions=1000,
        **settings,
    )


def run_rounds(engine: Engine) -> None:
    for messages in conversations():
        for message in messages:
            engine.add(message)
            engine.step(3)
        engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_output_is_unchanged_by_prefix_loaded_from_host(mode, policy):
    host = HostConfig(enable_cache=True, write_policy=policy)
    engine = engine_of(mode, host_pages=400 // mode[2], host=host)
    run_rounds(engine)
    assert engine.scheduler.tally.host_cached_tokens > 0


@pytest.mark.parametrize("stored", [False, True])
def test_resumed_output_tokens_are_not_counted_as_cached_prompt(stored):
    storage = MemoryStorage() if stored else None
    host_pages = 24 if stored else 100
    engine = engine_of((False, False, 4), host_pages=host_pages, host=HostConfig(enable_cache=True), storage=storage)
    for number, prompt in enumerate(PROMPTS):
        engine.add(make_message(f"first-{number}", [*prompt], max_tokens=4))
        engine.run()
    resumed = make_message("resumed", [*PROMPTS[0][:44]], max_tokens=40)
    engine.add(structs.replace(resumed, resume_ids=PROMPTS[0][44:60]))
    engine.run()
    tally = engine.scheduler.tally
    below = tally.disk_cached_tokens if stored else tally.host_cached_tokens
    assert below == len(resumed.input_ids) - 32, "the device has kept what the third prompt shares"
    assert tally.host_cached_tokens + tally.disk_cached_tokens == below
    first = engine.received["resumed"].outputs[0]
    assert first.cached_tokens == len(resumed.input_ids)
    assert first.cache_hits == (CacheHits(disk=below) if stored else CacheHits(host=below))


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_host_pool_smaller_than_the_device_pool_only_hits_less(mode, policy):  # [pinned-host-block] [copy-acked]
    engine = engine_of(mode, host_pages=max(2, 40 // mode[2]), host=HostConfig(enable_cache=True, write_policy=policy))
    run_rounds(engine)


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_output_is_unchanged_by_prefix_loaded_from_storage(mode):
    storage = MemoryStorage()
    host = HostConfig(enable_cache=True)
    engine = engine_of(mode, host_pages=96 // mode[2], host=host, storage=storage)
    run_rounds(engine)
    assert engine.scheduler.tally.disk_cached_tokens > 0


@pytest.mark.parametrize("mode", MODES, ids=name)
def test_swapped_request_has_unchanged_output(mode):
    engine = engine_of(
        mode,
        pages=400,
        host_pages=400 // mode[2],
        host=HostConfig(swap_bytes=1 << 30),
        preemption_mode=PreemptionMode.SWAP,
        force_retract_every=2,
    )
    run_rounds(engine)
    tally = engine.scheduler.tally
    assert tally.swapped_out > 10
    assert tally.swapped_in + tally.swap_misses == tally.swapped_out


@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_swapping_for_lack_of_pages_changes_no_output(mode, radix):  # [retraction-bounded] [one-memory-check]
    engine = engine_of(
        mode,
        radix=radix,
        host_pages=200 // mode[2],
        host=HostConfig(swap_bytes=1 << 30),
        preemption_mode=PreemptionMode.SWAP,
    )
    run_rounds(engine)


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("overlap", [False, True])
def test_tiers_and_swapping_share_host_memory(overlap, policy):
    host = HostConfig(enable_cache=True, write_policy=policy, swap_bytes=10 * 64)
    engine = engine_of(
        (overlap, True, 4),
        host_pages=40,
        host=host,
        storage=MemoryStorage(),
        preemption_mode=PreemptionMode.SWAP,
        force_retract_every=3,
    )
    run_rounds(engine)
    assert engine.scheduler.tally.swapped_out > 0


@pytest.mark.parametrize("seed", range(3))
def test_same_whenever_copies_happen_to_run(seed):
    engine = engine_of(
        (True, True, 4),
        host_pages=60,
        host=HostConfig(enable_cache=True, write_policy=WritePolicy.WRITE_BACK, swap_bytes=20 * 64),
        preemption_mode=PreemptionMode.SWAP,
        force_retract_every=4,
        executor=lambda model: ThreadedExecutor(model, seed=seed),
    )
    for messages in conversations():
        for message in messages:
            engine.add(message)
            engine.step(3)
        while not engine.scheduler.idle:
            engine.step()
    engine.executor.shutdown()
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode[0]], ids=name)
def test_handed_over_requests_meet_tiers_on_both_sides(mode, policy):  # [late-write] [settled-only-sent] [page-fence]
    _, mixed, page_size = mode
    pair = make_pair(
        enable_overlap=True,
        enable_mixed_chunk=mixed,
        page_size=page_size,
        usable_pages=144 // page_size,
        chunked_prefill_size=24,
        max_retractions=1000,
        init_new_token_ratio=0.1,
        host_pages=400 // page_size,
        host=HostConfig(enable_cache=True, write_policy=policy, swap_bytes=16 * 50),
        decode={"preemption_mode": PreemptionMode.SWAP, "force_retract_every": 3},
    )
    for turn in range(3):
        for number, prompt in enumerate(PROMPTS):
            pair.submit(f"round{turn}-{number}", [*prompt, *range(turn)], max_tokens=6)
            pair.turn(3)
        pair.run(max_turns=3000)
    for rid in pair.decode.engine.messages:
        assert pair.decode.tokens(rid) == pair.expected(rid), rid
    assert pair.decode.engine.scheduler.tally.swapped_out > 0
    pair.assert_clean()


@pytest.mark.parametrize("overlap", [False, True])
def test_choices_and_sessions_share_prefixes_loaded_from_host(overlap):
    engine = engine_of(
        (overlap, True, 4),
        host_pages=80,
        host=HostConfig(enable_cache=True, write_policy=WritePolicy.WRITE_BACK, swap_bytes=20 * 64),
        preemption_mode=PreemptionMode.SWAP,
        force_retract_every=3,
        session_pages=8,
    )
    talk = make_message("turn-0", PROMPTS[1][:30], max_tokens=5, session=SessionRef(id="talk"))
    engine.add(talk)
    engine.run()
    for turn in range(3):
        choices = [
            make_message(f"{turn}-choice-{i}", PROMPTS[0], max_tokens=6, temperature=1.0, seed=i, group=f"{turn}")
            for i in range(3)
        ]
        other = make_message(f"{turn}-other", PROMPTS[3], max_tokens=8)
        for message in (*choices, other):
            engine.add(message)
            engine.step(2)
        engine.run()
    follow_up = make_message("turn-1", [7, 7, 7], max_tokens=5, session=SessionRef(id="talk", turn=1))
    engine.add(follow_up)
    engine.run()
    spoken = (*talk.input_ids, *engine.output("turn-0"), *follow_up.input_ids)
    engine.messages["turn-1"] = make_message("turn-1", spoken, max_tokens=5)
    engine.assert_expected()
    engine.assert_nothing_held()
    assert engine.scheduler.tally.swapped_out > 0
    assert engine.scheduler.tally.host_cached_tokens > 0
