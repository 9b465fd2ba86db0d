"""Prefill under a token budget."""

import pytest

from tandem_engine.forward.batch import ForwardMode
from tandem_testing.scheduler_builders import Engine, make_engine, make_message


def extend_lens(engine: Engine) -> list[list[int]]:
    """Prompt tokens per request of each step that prefilled."""
    return [batch.extend_lens[: batch.num_extend].tolist() for batch in engine.executor.batches if batch.num_extend]


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 31 + i * 7) % 90 + 1 for i in range(length)]


def test_prompts_of_5000_500_1200_fill_steps_of_2000_tokens():  # [step-budget]
    engine = make_engine(
        page_size=16,
        usable_pages=500,
        context_length=8192,
        max_prefill_tokens=2000,
        chunked_prefill_size=2000,
        audit_every_step=False,
    )
    for rid, length in [("a", 5000), ("b", 500), ("c", 1200)]:
        engine.add(make_message(rid, prompt(length, ord(rid)), max_tokens=1))
    engine.run()
    assert extend_lens(engine) == [[2000], [2000], [1000, 500, 500], [700]]
    engine.assert_expected()


def test_chunk_that_is_not_the_last_yields_no_token():  # [chunk-keeps-place]
    engine = make_engine(chunked_prefill_size=4, max_prefill_tokens=4)
    engine.add(make_message(prompt=prompt(10), max_tokens=1))
    engine.step(2)
    assert "r" not in engine.received
    assert [len(batch.sample_index) for batch in engine.executor.batches] == [0, 0]
    engine.step()
    engine.assert_expected()


def test_chunked_request_keeps_row_and_pages_between_chunks():  # [chunk-keeps-place]
    engine = make_engine(chunked_prefill_size=4)
    engine.add(make_message(prompt=prompt(10)))
    engine.step()
    kv = engine.scheduler.queues.chunked.kv
    engine.step()
    assert engine.scheduler.queues.chunked.kv is kv
    assert kv.committed_len == 8


def test_chunked_request_runs_first_with_computed_part_as_prefix():  # [chunk-keeps-place]
    engine = make_engine(chunked_prefill_size=4, max_prefill_tokens=6)
    engine.add(make_message("first", prompt(6), max_tokens=1))
    engine.add(make_message("second", prompt(4, 2), max_tokens=1))
    engine.run()
    assert extend_lens(engine) == [[4], [2, 4]]
    assert engine.executor.batches[1].seq_lens.tolist() == [6, 4]


def test_prompt_is_cut_so_that_short_ones_fit_in_step():  # [long-prompt-cut]
    engine = make_engine(chunked_prefill_size=8, max_prefill_tokens=32)
    engine.add(make_message("long", prompt(20), max_tokens=1))
    engine.add(make_message("short", prompt(5, 2), max_tokens=1))
    engine.run()
    assert extend_lens(engine) == [[8, 5], [8], [4]]


def test_only_one_prompt_is_half_computed_at_a_time():
    engine = make_engine(chunked_prefill_size=8, max_prefill_tokens=32)
    engine.add(make_message("first", prompt(20), max_tokens=1))
    engine.add(make_message("second", prompt(20, 2), max_tokens=1))
    engine.run()
    assert extend_lens(engine) == [[8], [8], [4, 8], [8], [4]]


def test_head_without_memory_is_not_overtaken():  # [no-overtaking]
    engine = make_engine(usable_pages=8, page_size=4, init_new_token_ratio=1.0, min_new_token_ratio=1.0)
    engine.add(make_message("running", prompt(12), max_tokens=6))
    engine.add(make_message("large", prompt(17, 2), max_tokens=4))
    engine.add(make_message("small", prompt(2, 3), max_tokens=1))
    engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["large", "small"]
    engine.run()
    ends = [output.rid for _, outputs in engine.deliveries for output in outputs if output.finish]
    assert ends.index("running") < ends.index("large")


def test_whole_rest_of_a_prompt_is_reserved_not_only_its_chunk():  # [chunk-keeps-place]
    engine = make_engine(usable_pages=10, page_size=4, chunked_prefill_size=4, max_prefill_tokens=64)
    engine.add(make_message("long", prompt(32), max_tokens=4))
    engine.add(make_message("next", prompt(4, 2), max_tokens=12))
    engine.step()
    assert [req.rid for req in engine.scheduler.queues.waiting] == ["next"]


def test_second_turn_computes_only_its_new_tokens():  # [turn-reuses-cache]
    engine = make_engine(page_size=4)
    first = make_message("one", prompt(8), max_tokens=9)
    engine.add(first)
    engine.run()
    history = [*first.input_ids, *engine.output("one")]
    engine.add(make_message("two", [*history, 5, 6], max_tokens=2))
    engine.run()
    # 8 + 9 tokens have KV of 16 (the last was never computed): four whole pages.
    assert extend_lens(engine) == [[8], [3]]
    assert engine.received["two"].outputs[0].cached_tokens == 16
    engine.assert_expected()


def test_fully_cached_prompt_still_computes_one_token():  # [resume-as-extend] [one-token-computed]
    engine = make_engine(page_size=4)
    engine.add(make_message("one", prompt(8), max_tokens=1))
    engine.run()
    engine.add(make_message("two", prompt(8), max_tokens=1))
    engine.run()
    assert extend_lens(engine) == [[8], [4]]


def test_different_salts_share_nothing():
    engine = make_engine(page_size=4)
    for rid, salt in [("one", "a"), ("two", "b")]:
        engine.add(make_message(rid, prompt(9), max_tokens=1, cache_salt=salt))
        engine.run()
    assert extend_lens(engine) == [[9], [9]]


def test_prompt_is_matched_before_its_tokens_are_counted():  # [match-then-count]
    engine = make_engine(page_size=4, max_prefill_tokens=8, chunked_prefill_size=8)
    engine.add(make_message("one", prompt(16), max_tokens=1))
    engine.run()
    engine.add(make_message("two", prompt(16), max_tokens=1))
    engine.add(make_message("three", prompt(4, 3), max_tokens=1))
    engine.run()
    assert extend_lens(engine)[2:] == [[4, 4]]


def test_requests_of_one_step_share_no_uncomputed_pages():  # [settled-before-shared]
    engine = make_engine(page_size=4)
    for rid in ("one", "two"):
        engine.add(make_message(rid, prompt(9), max_tokens=4))
    engine.run()
    assert extend_lens(engine) == [[9, 9]]
    engine.assert_expected()


def test_failed_admission_gives_back_row_and_lock():  # [admission-unwinds]
    engine = make_engine(usable_pages=8, page_size=4, init_new_token_ratio=1.0, min_new_token_ratio=1.0)
    engine.add(make_message("running", prompt(8), max_tokens=12))
    engine.add(make_message("waiting", [*prompt(8), 1, 2, 3], max_tokens=16))
    engine.step(4)
    assert len(engine.scheduler.queues.waiting) == 1
    assert engine.scheduler.audit().requests == 1
    assert engine.memory.rows.available == engine.memory.rows.max_rows - 1


@pytest.mark.parametrize("mixed", [False, True])
def test_max_running_requests_is_never_exceeded(mixed):
    engine = make_engine(max_running_requests=2, enable_mixed_chunk=mixed)
    for number in range(5):
        engine.add(make_message(f"r{number}", prompt(4, number), max_tokens=4))
    engine.run()
    assert max(batch.num_sequences for batch in engine.executor.batches) == 2
    assert {batch.mode for batch in engine.executor.batches} >= {ForwardMode.EXTEND, ForwardMode.DECODE}
    engine.assert_expected()
