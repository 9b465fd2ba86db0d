import pytest

from tandem_engine.config import HostConfig
from tandem_engine.messages.outputs import CacheHits, FinishReason
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.scheduler_builders import Engine, make_engine, make_message
from tandem_testing.toy_grammar import ToyGrammars, toy_grammar

PROMPT = [*range(1, 14)]


@pytest.fixture
def storage() -> MemoryStorage:
    """Has the three whole pages of `PROMPT`, and answers when a test says so."""
    storage = MemoryStorage()
    engine = tiered(storage)
    engine.add(make_message("earlier", PROMPT, max_tokens=2))
    engine.run()
    engine.step(4)
    assert len(storage) == 3
    storage.at_once = False
    return storage


def tiered(storage: MemoryStorage, *, timeout: float = 1.0, **config) -> Engine:
    host = HostConfig(enable_cache=True, prefetch_timeout=timeout)
    return make_engine(host_pages=32, host=host, storage=storage, **config)


@pytest.mark.parametrize("overlap", [False, True])
def test_request_waits_for_its_prefix_and_computes_the_rest(storage, overlap):
    engine = tiered(storage, enable_overlap=overlap)
    engine.add(make_message("r", PROMPT))
    engine.step(3)
    assert engine.model.forwards == 0
    assert engine.scheduler.stats().waiting == 1
    storage.run()
    engine.run()
    engine.assert_expected()
    assert engine.scheduler.tally.disk_cached_tokens == 12
    first = engine.received["r"].outputs[0]
    assert (first.cached_tokens, first.cache_hits) == (12, CacheHits(disk=12))


def test_other_requests_are_served_during_the_wait(storage):
    engine = tiered(storage)
    engine.add(make_message("r", PROMPT))
    engine.add(make_message("other", [90, 91]))
    engine.step(20)
    assert engine.finish("other") is not None
    assert engine.finish("r") is None
    storage.run()
    engine.run()
    engine.assert_expected()


def test_late_prefetch_is_computed(storage):
    engine = tiered(storage)
    engine.add(make_message("r", PROMPT))
    engine.step()
    engine.clock.time = 1.0
    engine.run()
    engine.assert_expected()
    assert engine.scheduler.tally.disk_cached_tokens == 0
    storage.run()
    engine.step(2)
    engine.assert_nothing_held()


def test_prefetch_timeout_zero_skips_the_wait(storage):
    engine = tiered(storage, timeout=0.0)
    engine.add(make_message("r", PROMPT))
    engine.run()
    engine.assert_expected()


def test_abort_while_waiting_for_storage(storage):
    engine = tiered(storage)
    engine.add(make_message("r", PROMPT))
    engine.step()
    engine.scheduler.abort("r")
    engine.step()
    assert engine.finish().reason is FinishReason.ABORT
    assert engine.scheduler.idle
    storage.run()
    engine.step(2)
    engine.assert_nothing_held()


def test_waiting_for_storage_counts_as_waiting(storage):
    engine = tiered(storage, max_queued_requests=1)
    engine.add(make_message("r", PROMPT))
    engine.add(make_message("next", [1, 2]))
    assert engine.finish("next").code == "queue_full"


def test_storage_miss_queues_prompt_without_prefetch(storage):
    engine = tiered(storage)
    engine.add(make_message("r", [80, 81, 82, 83, 84]))
    engine.run()
    engine.assert_expected()


@pytest.mark.parametrize("overlap", [False, True])
def test_storage_reads_while_a_grammar_is_compiled(storage, overlap):
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    engine = tiered(storage, grammars=grammars, enable_overlap=overlap)
    engine.add(make_message("r", PROMPT, grammar=spec))
    engine.step(2)
    storage.run()
    engine.step(2)
    assert engine.model.forwards == 0
    grammars.finish(spec)
    engine.run()
    engine.assert_expected()
    assert engine.scheduler.tally.disk_cached_tokens == 12
    engine.assert_nothing_held()


def test_request_with_grammar_ready_awaits_disk_prefetch(storage):
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    engine = tiered(storage, grammars=grammars)
    engine.add(make_message("r", PROMPT, grammar=spec))
    grammars.finish(spec)
    engine.step(3)
    assert engine.model.forwards == 0
    assert engine.scheduler.stats().waiting == 1
    storage.run()
    engine.run()
    engine.assert_expected()
    assert engine.scheduler.tally.disk_cached_tokens == 12


def test_storage_wait_counts_from_arrival(storage):
    grammars, spec = ToyGrammars(hold=True), toy_grammar()
    engine = tiered(storage, grammars=grammars)
    engine.add(make_message("r", PROMPT, grammar=spec))
    engine.step()
    engine.clock.time = 1.0
    grammars.finish(spec)
    engine.run()
    engine.assert_expected()
    assert engine.scheduler.tally.disk_cached_tokens == 0
    storage.run()
    engine.step(2)
    engine.assert_nothing_held()


def test_abort_during_prefetch_and_compilation_leaks_nothing(storage):
    engine = tiered(storage, grammars=ToyGrammars(hold=True))
    engine.add(make_message("r", PROMPT, grammar=toy_grammar()))
    engine.step()
    engine.scheduler.abort("r")
    engine.step()
    assert engine.finish("r").reason is FinishReason.ABORT
    assert not engine.scheduler.queues.reading
    storage.run()
    engine.step(2)
    engine.assert_nothing_held()


def test_request_joins_where_it_would_have_stood(storage):
    engine = tiered(storage, max_running_requests=1)
    engine.add(make_message("running", [80, 81], max_tokens=20))
    engine.step(2)
    for rid, prompt in (("before", [90]), ("r", PROMPT), ("after", [91])):
        engine.clock.time += 0.1
        engine.add(make_message(rid, prompt))
    storage.run()
    engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["before", "r", "after"]
    engine.run()
    engine.assert_expected("running", "before", "r", "after")
