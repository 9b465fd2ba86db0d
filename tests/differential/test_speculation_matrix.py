"""However tokens are drafted, the output is what it would be without drafts.

The proposer knows the fake model's answers and gets them right, wrong, or both; the fake model reads its KV,
so a rejected draft that is mistaken for history, or a page that is not there, becomes a wrong token.
"""

import random
from itertools import product

import pytest

from tandem_engine.config import HostConfig, PreemptionMode, WritePolicy
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.sampling import ReasoningBudget
from tandem_testing.disagg_pair import make_pair
from tandem_testing.draft_builders import make_fake_drafts
from tandem_testing.fake_executors import ThreadedExecutor
from tandem_testing.scheduler_builders import VOCAB, Engine, expected_output, make_engine, make_message
from tandem_testing.scripted_proposer import (
    Script,
    ScriptedProposer,
    always_right,
    always_wrong,
    wrong_at_random,
    wrong_every,
)
from tandem_testing.toy_grammar import toy_grammar

MISTAKES = {
    "right": lambda: always_right,
    "wrong": lambda: always_wrong,
    "every third wrong": lambda: wrong_every(3),
    "random": lambda: wrong_at_random(5),
}
SHARED = tuple(range(10, 43))
BUDGET = ReasoningBudget(tokens=5, begin=(62,), end=(60, 61), opened=True)


def workload():
    """Every way to end an output, in the middle of a run."""
    return [
        make_message("long", range(1, 60), max_tokens=23),
        make_message("shared-1", [*SHARED, 50, 51], max_tokens=12),
        make_message("one-token", [5], max_tokens=1),
        make_message("shared-2", [*SHARED, 52], max_tokens=40, ignore_eos=False),
        make_message("same", [*SHARED, 50, 51], max_tokens=12),
        make_message("sampled", range(3, 20), max_tokens=15, temperature=0.9, seed=7),
        make_message("two", [*SHARED], max_tokens=2),
        make_message("resumed", SHARED[:9], max_tokens=14, resume=(4, 9, 2)),
        make_message("minimum", [8, 8, 8], max_tokens=18, min_tokens=9, ignore_eos=False, stop_token_ids=(3, 4, 5)),
        make_message("string", [9, 1], max_tokens=30, stop=("ab", "qx", "z")),
        make_message("logprobs", [7, 7], max_tokens=17, logprobs=2),
        *(
            make_message(f"choice-{i}", SHARED[3:30], max_tokens=8 + i, temperature=1.0, seed=i, group="choices")
            for i in range(3)
        ),
        *edited(),
        *constrained(),
    ]


def constrained():  # [masks-after-settling] [mask-per-row]
    """Each position of a run has the mask that follows the drafts before it; grammars end in the middle of runs."""
    return [
        make_message("grammar", [*SHARED, 61], max_tokens=30, grammar=toy_grammar(every=5, length=14)),
        make_message("grammar-eos", [7, 9], max_tokens=30, min_tokens=6, grammar=toy_grammar(every=2, optional=3)),
        make_message("grammar-noise", range(5, 28), max_tokens=9, temperature=0.8, grammar=toy_grammar(every=7)),
        make_message("grammar-resumed", SHARED[:5], max_tokens=9, resume=(3, 9, 6), grammar=toy_grammar(every=3)),
        make_message("grammar-edited", [3, 1], grammar=toy_grammar(length=12), presence_penalty=1.5),
        make_message("budget", [*SHARED, 63], max_tokens=16, reasoning_budget=BUDGET),
        make_message("budget-resumed", SHARED[:6], max_tokens=12, resume=(4, 9, 2), reasoning_budget=BUDGET),
        make_message("budget-grammar", [3, 2], max_tokens=25, reasoning_budget=BUDGET, grammar=toy_grammar(length=6)),
    ]


def edited():  # [every-accepted-token]
    """Logits that depend on every token before, accepted drafts included."""
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    return [
        make_message("penalised", [*SHARED, 50], max_tokens=16, prompt_logprobs=1, **penalties),
        make_message("biased", [4, 4], max_tokens=9, logit_bias=((3, 2.0), (9, -4.0)), presence_penalty=-1.0),
        make_message("resumed-penalised", SHARED[:7], max_tokens=14, resume=(4, 9, 2), repetition_penalty=0.5),
        make_message("allowed", [6, 2], max_tokens=20, allowed_token_ids=(3, 5, 8), bad_words=((3, 5), (5, 3, 8))),
        make_message("scored", range(1, 60), max_tokens=9, prompt_logprobs=2, temperature=0.8, seed=3),
    ]


def proposer_of(mistake: str) -> ScriptedProposer:
    scripts = [
        Script(message.sampling, [*message.input_ids, *expected_output(message)])
        for message in workload()
        if message.sampling.edits_logits or message.sampling.min_tokens or message.sampling.masked
    ]
    return ScriptedProposer(vocab_size=VOCAB, scripts=scripts, mistake=MISTAKES[mistake]())


def engine_of(mistake: str, **settings: object) -> Engine:
    return make_engine(proposer=proposer_of(mistake), **settings)


def test_scripted_proposer_has_most_drafts_accepted():
    """Or the matrix would prove less than it says."""
    engine = engine_of("right", usable_pages=400)
    run_staggered(engine)
    stats = engine.scheduler.stats().speculation
    # Drafts beyond a stop are drafts of a text that is never computed.
    assert stats.accepted_total > 0.9 * stats.drafted_total > 150


def run_staggered(engine: Engine) -> None:
    for message in workload():
        engine.add(message)
        engine.step(2)
    engine.run()


def assert_logprobs_belong_to_their_tokens(engine: Engine) -> None:  # [one-cut]
    received = engine.received["logprobs"]
    assert [entry.logprob for entry in received.logprobs] == [-1.0 - token / VOCAB for token in received.tokens]


def assert_right(engine: Engine) -> None:
    """Every token, every logprob, and nothing left behind."""
    engine.assert_expected()
    engine.assert_nothing_held()
    assert_logprobs_belong_to_their_tokens(engine)
    assert engine.scheduler.stats().speculation.drafted_total > 0


SCHEDULES = list(product([False, True], [1, 4, 16], [7, 1000], [False, True]))
"""Overlap, page size, chunk size, MIXED."""


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(("overlap", "page_size", "chunk", "mixed"), SCHEDULES)
def test_output_is_equal_for_every_kind_of_draft(mistake, overlap, page_size, chunk, mixed):
    engine = engine_of(
        mistake,
        enable_overlap=overlap,
        page_size=page_size,
        usable_pages=1 + 800 // page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
    )
    run_staggered(engine)
    assert_right(engine)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("writes_kv", [False, True])
def test_same_output_when_requests_are_retracted_again_and_again(mistake, overlap, writes_kv):
    engine = engine_of(mistake, enable_overlap=overlap, enable_mixed_chunk=True, force_retract_every=2)
    engine.scheduler._shared.speculation.proposer.writes_kv = writes_kv
    run_staggered(engine)
    assert engine.scheduler.tally.retracted > 5
    assert_right(engine)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("writes_kv", [False, True])
def test_same_output_when_memory_is_tight(mistake, page_size, writes_kv):  # [one-memory-check] [draft-pages]
    pages = {1: 100, 4: 25, 16: 7}[page_size]
    engine = engine_of(
        mistake,
        page_size=page_size,
        usable_pages=pages,
        enable_overlap=True,
        init_new_token_ratio=0.1,
        max_retractions=200,
    )
    engine.scheduler._shared.speculation.proposer.writes_kv = writes_kv
    run_staggered(engine)
    assert_right(engine)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_leave_no_trace_in_other_outputs(mistake, overlap):  # [abort-is-deferred] [abort-before-token]
    engine = engine_of(mistake, enable_overlap=overlap)
    messages = workload()
    for number, message in enumerate(messages):
        engine.add(message)
        engine.step(2)
        if number % 2:
            engine.scheduler.abort(messages[number - 1].rid)
    engine.run()
    engine.assert_nothing_held()
    for message in messages:
        expected, got = expected_output(message), engine.output(message.rid)
        assert got == expected[: len(got)], message.rid
        assert got == expected or engine.finish(message.rid).reason is FinishReason.ABORT, message.rid


@pytest.mark.parametrize("mistake", MISTAKES)
def test_same_output_whenever_the_device_happens_to_run(mistake):
    engine = engine_of(
        mistake,
        enable_overlap=True,
        enable_mixed_chunk=True,
        chunked_prefill_size=7,
        usable_pages=40,
        init_new_token_ratio=0.1,
        max_retractions=200,
        executor=lambda model: ThreadedExecutor(model, seed=3),
    )
    run_staggered(engine)
    engine.executor.shutdown()
    assert_right(engine)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_same_output_when_some_draft_and_some_do_not(mistake):
    engine = engine_of(mistake, enable_overlap=True, enable_mixed_chunk=True, adaptive=True, max_draft_batch=3)
    run_staggered(engine)
    assert_right(engine)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("seed", range(3))
def test_same_output_however_long_steps_take(mistake, seed):
    engine = engine_of(mistake, enable_overlap=True, adaptive=True, usable_pages=200)
    dice = random.Random(seed)
    for message in workload():
        engine.add(message)
    while not engine.scheduler.idle:
        engine.clock.time += dice.choice((0.0, 0.001, 1.0, 30.0))
        engine.step()
    assert_right(engine)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("overlap", [False, True])
def test_decode_worker_drafts_for_requests_that_were_handed_over(mistake, overlap):
    proposer = proposer_of(mistake)
    pair = make_pair(decode={"proposer": proposer}, enable_overlap=overlap, chunked_prefill_size=4)
    rids = [pair.submit(f"r{i}", SHARED[: 5 + 3 * i], max_tokens=6 + i) for i in range(6)]
    pair.run()
    assert proposer.proposals
    for rid in rids:
        assert pair.decode.engine.output(rid) == pair.expected(rid)
    pair.assert_clean()


@pytest.mark.parametrize("settings", [{}, {"force_retract_every": 2}, {"chunked_prefill_size": 5}], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_draft_model_keeps_its_kv_through_everything(settings, page_size, overlap):
    """The drafting model is the model and reads its own KV: one wrong page, and a draft is rejected."""
    pages = 1 + 800 // page_size
    drafts = make_fake_drafts(num_pages=pages + 1, page_size=page_size, vocab_size=VOCAB, max_text=20)
    engine = make_engine(
        proposer=drafts.proposer,
        page_size=page_size,
        usable_pages=pages,
        enable_overlap=overlap,
        enable_mixed_chunk=True,
        **settings,
    )
    # The draft model gets neither min_tokens nor edits nor masks.
    reported = [message for message in workload() if not (message.sampling.edits_logits or message.sampling.masked)]
    messages = [message for message in reported if not message.sampling.min_tokens]
    for message in messages:
        engine.add(message)
        engine.step(2)
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
    stats = engine.scheduler.stats().speculation
    assert stats.accepted_total == stats.drafted_total > 50


TIERS = {
    "host cache": {"host": HostConfig(enable_cache=True, write_policy=WritePolicy.WRITE_BACK)},
    "swapped": {
        "host": HostConfig(swap_bytes=1 << 30),
        "preemption_mode": PreemptionMode.SWAP,
        "force_retract_every": 3,
        "max_retractions": 1000,
    },
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_draft_model_output_is_right_after_swap_or_host_load(tier, page_size, overlap):
    """Draft KV stays behind when KV is copied to host memory and to other pages of the device."""
    pages = 160 // page_size
    drafts = make_fake_drafts(num_pages=pages + 1, page_size=page_size, vocab_size=VOCAB)
    engine = make_engine(
        proposer=drafts.proposer,
        page_size=page_size,
        usable_pages=pages,
        host_pages=400 // page_size,
        enable_overlap=overlap,
        enable_mixed_chunk=True,
        init_new_token_ratio=0.1,
        **TIERS[tier],
    )
    for turn in range(3):
        for number, start in enumerate((10, 40, 5)):
            prompt = [*range(start, start + 50), *range(turn)]
            engine.add(make_message(f"{turn}-{number}", prompt, max_tokens=8 + number))
            engine.step(3)
        engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
    stats, tally = engine.scheduler.stats().speculation, engine.scheduler.tally
    assert stats.accepted_total == stats.drafted_total > 30
    assert tally.host_cached_tokens if tier == "host cache" else tally.swapped_out


def test_draft_model_catches_up_with_kv_that_was_handed_over():
    drafts = make_fake_drafts(num_pages=65, page_size=4, vocab_size=VOCAB)
    pair = make_pair(decode={"proposer": drafts.proposer}, enable_overlap=True)
    rids = [pair.submit(f"r{i}", SHARED[: 5 + 3 * i], max_tokens=6 + i) for i in range(6)]
    pair.run()
    for rid in rids:
        assert pair.decode.engine.output(rid) == pair.expected(rid)
    stats = pair.decode.engine.scheduler.stats().speculation
    assert stats.accepted_total == stats.drafted_total > 10
    pair.assert_clean()


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("overlap", [False, True])
def test_drafted_output_is_unchanged_by_swapping(overlap, policy):
    engine = engine_of(
        "every third wrong",
        enable_overlap=overlap,
        enable_mixed_chunk=True,
        usable_pages=30,
        init_new_token_ratio=0.1,
        max_retractions=1000,
        host_pages=60,
        host=HostConfig(enable_cache=True, write_policy=policy, swap_bytes=16 * 64),
        preemption_mode=PreemptionMode.SWAP,
        force_retract_every=5,
    )
    for message in workload():
        engine.add(message)
        engine.step(3)
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
    assert engine.scheduler.tally.swapped_in > 0
