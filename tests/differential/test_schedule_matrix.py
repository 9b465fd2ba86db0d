"""However a request is scheduled, its output is the same.

Every engine runs the fake model that reads its KV, so the outputs prove that each forward saw exactly
the history of its request. The reference computes each request alone from its plain token history.
"""

from itertools import combinations, product

import pytest
from msgspec import structs

from tandem_engine.config import SchedulePolicy
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import ReasoningBudget
from tandem_testing.fake_executors import ThreadedExecutor
from tandem_testing.scheduler_builders import Engine, expected_output, make_engine, make_message
from tandem_testing.toy_grammar import toy_grammar

WHOLE = 10_000
Case = tuple[bool, bool, int, int, bool]
"""Overlap, radix cache, page size, chunk size, MIXED."""
AXES = ([False, True], [False, True], [1, 4, 16], [1, 7, 64, WHOLE], [False, True])


def levels(case: Case) -> int:
    return sum(axis.index(value) for axis, value in zip(AXES, case, strict=True))


FOURS: list[Case] = [case for case in product(*AXES) if levels(case) % 2 == 0]
"""A half of all cases, in which any values of four axes still meet."""
PAIRS = [case for case in FOURS if levels(case) % 4 == 0]
"""A quarter, in which every pair of values of two axes still meets."""


def name(case: Case) -> str:
    overlap, radix, page, chunk, mixed = case
    return (
        f"{'overlap' if overlap else 'normal'}-{'radix' if radix else 'nocache'}-page{page}-"
        f"chunk{chunk}-{'mixed' if mixed else 'separate'}"
    )


WORDS = tuple((first, second) for first in range(60) for second in (first, 7, 30, 41))
"""One in ten of the pairs that could follow one another."""
SHARED = tuple(range(10, 43))
"""A prefix of two whole pages and a bit, at the largest page size."""


def workload() -> list[GenerateRequest]:
    """Short and long, shared and own prefixes, greedy and sampled, with every way to end."""
    return [
        make_message("long", range(1, 90), max_tokens=9),
        make_message("shared-1", [*SHARED, 50, 51], max_tokens=12),
        make_message("one-token", [5], max_tokens=6),
        make_message("shared-2", [*SHARED, 52], max_tokens=20, ignore_eos=False),
        make_message("same", [*SHARED, 50, 51], max_tokens=12),
        make_message("sampled", range(3, 20), max_tokens=15, temperature=0.9, seed=7),
        make_message("single", [*SHARED], max_tokens=1),
        make_message("resumed", SHARED[:9], max_tokens=14, resume=(4, 9, 2)),
        make_message("minimum", [8, 8, 8], max_tokens=18, min_tokens=9, ignore_eos=False, stop_token_ids=(3, 4, 5)),
        make_message("string", [9, 1], max_tokens=30, stop=("ab", "qx", "z")),
        *(
            make_message(f"choice-{i}", SHARED[3:30], max_tokens=8 + i, temperature=1.0, seed=i, group="choices")
            for i in range(3)
        ),
        *edited(),
        *constrained(),
        *reasoning(),
    ]


def reasoning() -> list[GenerateRequest]:
    """Requests with a reasoning budget: spent, in a resumed output, opened by the model, before a grammar."""
    end = (60, 61)
    opened = ReasoningBudget(tokens=5, begin=(62,), end=end, opened=True)
    written = ReasoningBudget(tokens=4, begin=(3,), end=(5, 8))
    return [
        make_message("budget", [*SHARED, 63], max_tokens=16, reasoning_budget=opened, presence_penalty=1.5),
        make_message("budget-resumed", SHARED[:6], max_tokens=12, resume=(4, 9, 2), reasoning_budget=opened),
        make_message("budget-written", [6, 4], max_tokens=20, allowed_token_ids=(3, 5, 8), reasoning_budget=written),
        make_message(
            "budget-grammar",
            [3, 2],
            max_tokens=25,
            temperature=0.8,
            reasoning_budget=opened,
            grammar=toy_grammar(every=5, length=6),
        ),
    ]


def edited() -> list[GenerateRequest]:
    """Requests that change their logits or want their prompt scored. Strengths are powers of two, so exact."""
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    return [
        make_message("penalised", [*SHARED, 50], max_tokens=16, prompt_logprobs=1, **penalties),
        make_message("biased", [4, 4], max_tokens=9, logit_bias=((3, 2.0), (9, -4.0)), presence_penalty=-1.0),
        make_message("resumed-penalised", SHARED[:7], max_tokens=14, resume=(4, 9, 2), repetition_penalty=0.5),
        make_message("allowed", [6, 2], max_tokens=20, allowed_token_ids=(3, 5, 8), bad_words=((3, 5), (5, 3, 8))),
        make_message("worded", [1, 9], max_tokens=24, bad_words=WORDS),
        make_message(
            "scored", range(1, 60), max_tokens=3, prompt_logprobs=2, logprob_start=20, temperature=0.8, seed=3
        ),
    ]


def constrained() -> list[GenerateRequest]:
    """Requests with a grammar, alone and together with edits."""
    grammar = toy_grammar(every=3, length=12)
    return [
        make_message("grammar", [*SHARED, 60], max_tokens=25, grammar=toy_grammar(every=5, length=14)),
        make_message("grammar-eos", [7, 7], max_tokens=30, min_tokens=6, grammar=toy_grammar(every=2, optional=3)),
        make_message("grammar-noise", range(5, 28), max_tokens=9, temperature=0.8, grammar=toy_grammar(every=7)),
        make_message("grammar-resumed", SHARED[:5], max_tokens=9, resume=(3, 9, 6), grammar=toy_grammar(every=3)),
        make_message(
            "grammar-edited", [3, 1], max_tokens=20, grammar=grammar, presence_penalty=1.5, logit_bias=((6, 8.0),)
        ),
    ]


def engine_of(case: Case, **overrides: object) -> Engine:
    overlap, radix, page_size, chunk, mixed = case
    settings = {"usable_pages": 1 + 768 // page_size, **overrides}
    return make_engine(
        enable_overlap=overlap,
        radix=radix,
        page_size=page_size,
        chunked_prefill_size=chunk,
        max_prefill_tokens=max(chunk, 64),
        enable_mixed_chunk=mixed,
        **settings,
    )


def run_staggered(engine: Engine, messages: list[GenerateRequest]) -> None:
    """A new request every third step, so that prefills meet decodes in every phase."""
    for message in messages:
        engine.add(message)
        engine.step(3)
    engine.run()


@pytest.mark.parametrize(("cases", "axes"), [(FOURS, 4), (PAIRS, 2)])
def test_any_values_of_so_many_axes_meet_in_a_case(cases, axes):
    for chosen in combinations(range(len(AXES)), axes):
        met = {tuple(case[axis] for axis in chosen) for case in cases}
        assert met == set(product(*(AXES[axis] for axis in chosen)))


@pytest.mark.parametrize("case", FOURS, ids=name)
def test_output_is_equal_for_every_schedule(case):
    engine = engine_of(case)
    run_staggered(engine, workload())
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_same_output_when_requests_are_retracted_again_and_again(case):  # [owned-by-cursor] [settle-before-retract]
    engine = engine_of(case, force_retract_every=3)
    run_staggered(engine, workload())
    assert engine.scheduler.tally.retracted > 5
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_same_output_when_memory_is_tight(case):  # [retraction-bounded] [one-memory-check]
    page_size = case[2]
    pages = {1: 100, 4: 25, 16: 7}[page_size]
    engine = engine_of(case, usable_pages=pages, init_new_token_ratio=0.1, max_retractions=200)
    run_staggered(engine, workload())
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_aborts_leave_no_trace_in_other_outputs(case):  # [abort-is-deferred] [abort-before-token] [one-home]
    engine = engine_of(case)
    messages = workload()
    for number, message in enumerate(messages):
        engine.add(message)
        engine.step(2)
        if number % 2:
            engine.scheduler.abort(messages[number - 1].rid)
    engine.run()
    engine.assert_nothing_held()
    for message in messages:
        expected = expected_output(message)
        got = engine.output(message.rid)
        finish = engine.finish(message.rid)
        assert got == expected[: len(got)], message.rid
        assert got == expected or finish.reason is FinishReason.ABORT, message.rid


@pytest.mark.parametrize("policy", SchedulePolicy)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_same_output_under_every_policy(policy, overlap, mixed, page_size):
    """Few seats, few pages and rising priorities: all wait, and some are put back."""
    engine = make_engine(
        schedule_policy=policy,
        enable_overlap=overlap,
        enable_mixed_chunk=mixed,
        page_size=page_size,
        usable_pages={1: 200, 16: 16}[page_size],
        max_running_requests=3,
        chunked_prefill_size=16,
        max_tokens_per_step=24,
        priority_preemption_threshold=2,
        max_retractions=200,
    )
    for number, message in enumerate(workload()):
        engine.add(structs.replace(message, priority=number))
        engine.step(2)
    engine.run()
    assert engine.scheduler.tally.preempted > 0 or policy is not SchedulePolicy.PRIORITY
    engine.assert_expected()
    engine.assert_nothing_held()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_same_output_whenever_the_device_happens_to_run(seed, mixed):
    engine = make_engine(
        enable_overlap=True,
        enable_mixed_chunk=mixed,
        chunked_prefill_size=7,
        usable_pages=30,
        init_new_token_ratio=0.1,
        max_retractions=200,
        executor=lambda model: ThreadedExecutor(model, seed=seed),
    )
    run_staggered(engine, workload())
    engine.executor.shutdown()
    engine.assert_expected()
    engine.assert_nothing_held()
