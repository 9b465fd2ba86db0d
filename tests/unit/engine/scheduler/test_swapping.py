import pytest

from tandem_engine.config import HostConfig, PreemptionMode
from tandem_engine.memory.page_copies import CopyKind, PageCopy
from tandem_engine.messages.outputs import FinishReason
from tandem_testing.fake_executors import EagerExecutor
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

SPACE = HostConfig(swap_bytes=1 << 20)


def swapping(*, pages: int = 12, host_pages: int = 40, mode: PreemptionMode = PreemptionMode.SWAP, **config) -> Engine:
    """Admission expects no output, so two long outputs do not fit together."""
    settings = {"init_new_token_ratio": 0.01, "min_new_token_ratio": 0.01, "watermark": 0.0, **config}
    return make_engine(
        usable_pages=pages, host_pages=host_pages, host=SPACE, preemption_mode=mode, max_retractions=100, **settings
    )


def add(engine: Engine, rid: str, start: int, *, prompt: int = 9, max_tokens: int = 24, **fields) -> None:
    engine.add(make_message(rid, range(start, start + prompt), max_tokens=max_tokens, **fields))


def until_swapped(engine: Engine) -> str:
    for _ in range(200):
        engine.step()
        if engine.scheduler.queues.swapped:
            return engine.scheduler.queues.swapped[0].rid
    raise AssertionError("nobody was swapped")


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_newest_is_swapped_and_resumes_with_its_output(overlap, mixed):
    engine = swapping(enable_overlap=overlap, enable_mixed_chunk=mixed)
    add(engine, "old", 1)
    add(engine, "new", 40)
    assert until_swapped(engine) == "new"
    assert engine.scheduler.stats().swapped == 1
    assert engine.scheduler.stats().waiting == 0
    assert engine.scheduler.stats().running == 1
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
    stats = engine.scheduler.stats()
    assert stats.swapped_in_total == stats.swapped_out_total == stats.retracted_total > 0


def test_swapped_requests_return_before_new_ones_start():  # [swapped-first]
    engine = swapping()
    add(engine, "old", 1)
    add(engine, "new", 40)
    until_swapped(engine)
    add(engine, "later", 70, prompt=2, max_tokens=2)
    engine.step()
    assert engine.scheduler.stats().head_waits == "swapped_first"
    while engine.scheduler.queues.swapped:
        assert engine.finish("later") is None
        engine.step()
    engine.run()
    engine.assert_expected()


def test_swapped_requests_return_in_arrival_order():
    engine = swapping(pages=13)
    for rid, start in (("first", 1), ("second", 30), ("third", 60)):
        add(engine, rid, start, prompt=8, max_tokens=20)
    order = []
    for _ in range(300):
        before = [req.rid for req in engine.scheduler.queues.swapped]
        engine.step()
        after = [req.rid for req in engine.scheduler.queues.swapped]
        order += [rid for rid in before if rid not in after]
        assert after == sorted(after, key=["first", "second", "third"].index)
    engine.assert_expected()
    assert order


def test_no_swap_in_during_a_step_that_swaps_out():  # [swapped-first]
    engine = swapping(pages=40, force_retract_every=2, enable_mixed_chunk=True)
    add(engine, "old", 1)
    add(engine, "new", 40)
    tally = engine.scheduler.tally
    while not engine.scheduler.idle:
        out, back = tally.swapped_out, tally.swapped_in
        engine.step()
        assert not (tally.swapped_out > out and tally.swapped_in > back)
    engine.assert_expected()
    assert tally.swapped_out > 3


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_while_swapped_frees_the_host_pages(overlap):
    engine = swapping(enable_overlap=overlap)
    add(engine, "old", 1)
    add(engine, "new", 40)
    until_swapped(engine)
    engine.scheduler.abort("new")
    engine.run()
    assert engine.finish("new").reason is FinishReason.ABORT
    engine.assert_expected("old")
    engine.assert_nothing_held()
    for _ in range(5):
        engine.step()
    assert engine.memory.host.tier.pages.available == 40


def test_deadline_that_passes_while_swapped_is_obeyed():
    engine = swapping()
    add(engine, "old", 1)
    add(engine, "new", 40, deadline_s=5.0)
    until_swapped(engine)
    engine.clock.time = 6.0
    engine.run()
    assert engine.finish("new").code == "deadline_exceeded"
    engine.assert_nothing_held()


def test_request_without_host_memory_is_recomputed():
    engine = swapping(host_pages=2)
    add(engine, "old", 1)
    add(engine, "new", 40)
    engine.run()
    engine.assert_expected()
    assert engine.scheduler.tally.retracted > engine.scheduler.tally.swapped_out == 0


def test_recompute_mode_copies_nothing():
    engine = swapping(mode=PreemptionMode.RECOMPUTE)
    add(engine, "old", 1)
    add(engine, "new", 40)
    engine.run()
    engine.assert_expected()
    assert engine.executor.copies == []
    assert engine.scheduler.tally.retracted > 0


@pytest.mark.parametrize(("prefill_tokens_per_s", "swapped"), [(0.0, False), (1.0, True), (1e15, False)])
def test_auto_swap_takes_cheaper_predicted_way(prefill_tokens_per_s, swapped):
    engine = swapping(mode=PreemptionMode.AUTO)
    engine.scheduler.tally.prefill_tokens_per_s = prefill_tokens_per_s
    # A copy in each direction has been measured.
    for kind in (CopyKind.DEVICE_TO_HOST, CopyKind.HOST_TO_DEVICE):
        measure(engine, kind)
    add(engine, "old", 1)
    add(engine, "new", 40)
    engine.run()
    engine.assert_expected()
    assert (engine.scheduler.tally.swapped_out > 0) is swapped
    assert engine.scheduler.tally.retracted > 0


def measure(engine: Engine, kind: CopyKind) -> None:
    engine.memory.copies.launch(PageCopy(kind=kind, source=[1], target=[1]))
    engine.memory.poll()


def test_auto_swap_measures_swap_cost_once():
    engine = swapping(mode=PreemptionMode.AUTO)
    engine.scheduler.tally.prefill_tokens_per_s = 1e15
    add(engine, "old", 1)
    add(engine, "new", 40)
    engine.run()
    assert engine.scheduler.tally.swapped_out == 1


def test_swapped_request_with_evicted_prefix_is_recomputed():
    engine = swapping(pages=14, host_pages=40)
    shared = [*range(1, 9)]
    engine.add(make_message("old", [*shared, 20], max_tokens=26))
    engine.step(3)
    engine.add(make_message("new", [*shared, 30], max_tokens=26))
    until_swapped(engine)
    (req,) = engine.scheduler.queues.swapped
    assert req.swapped.first_page == 2
    engine.scheduler.abort("old")
    # Before the next plan, another request takes the pages that the two shared.
    engine.scheduler.queues.swapped.clear()
    engine.step()
    engine.memory.clear_cache()
    engine.scheduler.queues.swapped.append(req)
    engine.run()
    assert engine.scheduler.tally.swap_misses == 1
    engine.assert_expected("new")
    engine.assert_nothing_held()


def test_disabled_swapping_allocates_nothing():
    engine = make_engine(executor=EagerExecutor)
    add(engine, "r", 1)
    engine.run()
    assert engine.executor.copies == []
    assert engine.memory.host is None
