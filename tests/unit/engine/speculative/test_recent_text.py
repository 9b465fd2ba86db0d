"""Where a head may begin to read: not before the first token whose hidden states are here."""

from tandem_engine.speculative.draft_history import PageStamps, RecentText
from tandem_testing.draft_builders import DraftBench

TEXT = list(range(1, 40))


def history_of(bench: DraftBench, *, longest: int = 1000) -> RecentText:
    return RecentText(stamps=PageStamps(bench.memory.allocator.num_pages), longest=longest)


def test_text_that_was_computed_here_is_read_from_its_start():
    bench = DraftBench()
    assert history_of(bench).of(bench.request(TEXT)).window == 0


def test_long_text_window_starts_at_page_of_last_tokens():
    bench = DraftBench()
    assert history_of(bench, longest=10).of(bench.request(TEXT)).window == 28


def test_cached_prefix_is_read_if_its_states_were_left_here():
    bench = DraftBench()
    history = history_of(bench)
    first = bench.request(TEXT)
    history.release(first.kv, TEXT[:-1])
    bench.finish(first)
    second = bench.request(TEXT)
    assert second.kv.computed_from == 36
    assert history.of(second).window == 0


def test_cached_prefix_of_unknown_states_is_not_read():
    bench = DraftBench()
    first = bench.request(TEXT)
    bench.finish(first)
    assert history_of(bench).of(bench.request(TEXT)).window == 36


def test_text_that_was_handed_over_is_read_from_the_next_page_on():
    bench = DraftBench()
    history = history_of(bench)
    request = bench.request(TEXT)
    bench.memory.mark_brought(request.kv, 38)
    sequence = history.of(request)
    assert sequence.window == 40
    assert sequence.covered >= request.seq_len, "there is nothing to draft from yet"
    longer = bench.request([*TEXT, 50, 51], kv=request.kv)
    assert history.of(longer).covered == 40


def test_hidden_states_of_other_text_on_page_are_not_used():
    bench = DraftBench()
    history = history_of(bench)
    first = bench.request(TEXT)
    history.release(first.kv, TEXT[:-1])
    bench.memory.release(first.kv, (), checkpoint=False, after_step=None)
    other = bench.request([70, *TEXT[1:]])
    bench.finish(other)
    assert history.of(bench.request([70, *TEXT[1:]])).window == 36
