"""One budget of tokens per step: neither half of it starves the other [step-budget] [long-prompt-cut]."""

import pytest

from tandem_testing.scheduler_builders import Engine, make_engine, make_message


def steps(engine: Engine) -> list[tuple[int, int]]:
    """(prompt tokens, running requests) of each step."""
    return [
        (int(batch.extend_lens[: batch.num_extend].sum()), batch.num_sequences - batch.num_extend)
        for batch in engine.executor.batches
    ]


def crowd(engine: Engine, count: int, *, tokens: int = 40) -> None:
    """`count` requests that decode."""
    for number in range(count):
        engine.add(make_message(f"running{number}", [number + 1], max_tokens=tokens))
    while len(engine.scheduler.queues.running) < count:
        engine.step()
    engine.executor.batches.clear()


@pytest.mark.parametrize("budget", [9, 12, 40])
def test_prompts_get_budget_left_by_running_requests(budget):
    engine = make_engine(
        max_tokens_per_step=budget,
        max_running_requests=8,
        enable_mixed_chunk=True,
        chunked_prefill_size=64,
        max_prefill_tokens=64,
        usable_pages=400,
    )
    crowd(engine, 7)
    engine.add(make_message("long", [7] * 80, max_tokens=1))
    engine.step(2)
    assert steps(engine) == [(budget - 7, 7)] * 2
    engine.run()
    engine.assert_expected()


def test_mixed_step_advances_prompt_and_every_running_request():
    """The bound with decodes filling the budget: a prompt of n tokens takes no more than n steps."""
    engine = make_engine(
        max_tokens_per_step=9, max_running_requests=8, enable_mixed_chunk=True, usable_pages=200, max_rows=16
    )
    crowd(engine, 7, tokens=60)
    engine.add(make_message("long", [7] * 30, max_tokens=2))
    before = [len(req.output_ids) for req in engine.scheduler.queues.running]
    needed = 0
    while "long" not in engine.received:
        engine.step()
        needed += 1
    assert needed <= 30
    assert [len(req.output_ids) for req in engine.scheduler.queues.running[:7]] == [n + needed for n in before]


def test_no_step_is_larger_than_the_budget():
    engine = make_engine(
        max_tokens_per_step=10,
        max_running_requests=6,
        enable_mixed_chunk=True,
        chunked_prefill_size=64,
        usable_pages=200,
    )
    for number in range(20):
        engine.add(make_message(f"r{number}", [number + 1] * (1 + 7 * number % 40), max_tokens=1 + number % 9))
        engine.step(2)
    engine.run()
    assert max(prompt + decodes for prompt, decodes in steps(engine)) <= 10
    engine.assert_expected()


def test_default_step_budget_is_sum_of_prefill_and_decode_limits():
    engine = make_engine(
        max_running_requests=8, max_prefill_tokens=16, chunked_prefill_size=16, enable_mixed_chunk=True
    )
    crowd(engine, 5)
    engine.add(make_message("long", [7] * 40, max_tokens=1))
    engine.step()
    assert steps(engine) == [(16, 5)]


@pytest.mark.parametrize("mixed", [False, True])
def test_only_prompts_over_threshold_are_chunked_with_decode(mixed):  # [long-prompt-cut]
    engine = make_engine(
        long_prefill_token_threshold=8, chunked_prefill_size=32, enable_mixed_chunk=mixed, usable_pages=200
    )
    engine.add(make_message("first", [3] * 30, max_tokens=60))
    engine.step()
    assert steps(engine) == [(30, 0)]
    engine.executor.batches.clear()
    engine.add(make_message("long", [7] * 30, max_tokens=1))
    engine.add(make_message("short", [5] * 8, max_tokens=1))
    engine.step()
    assert engine.executor.batches[0].extend_lens.tolist()[:2] == [8, 8]
    engine.run()
    engine.assert_expected()
