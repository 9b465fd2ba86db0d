"""Choices of one answer share their prompt and end on their own [group-shares-prompt]."""

import pytest

from tandem_engine.base.names import RequestId
from tandem_engine.messages.outputs import FinishReason
from tandem_testing.scheduler_builders import ADAPTER, Engine, make_engine, make_message

PROMPT = [*range(1, 15)]
"""Three whole pages of four tokens and a half."""


def choices(engine: Engine, count: int = 3, *, group: str = "g", client: bytes = b"", **params: object) -> list[str]:
    rids = [f"{group}-{i}" for i in range(count)]
    for seed, rid in enumerate(rids):
        sampled = {"temperature": 0.9, "seed": seed, "max_tokens": 6 + seed, **params}
        engine.add(make_message(rid, PROMPT, group=group, **sampled), client)
    return rids


def prompt_tokens_computed(engine: Engine) -> int:
    return sum(
        int(batch.extend_lens[: batch.num_extend].sum()) for batch in engine.executor.batches if batch.num_extend
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("chunk", [5, 100])
def test_prompt_is_computed_once(overlap: bool, radix: bool, chunk: int):
    engine = make_engine(enable_overlap=overlap, radix=radix, chunked_prefill_size=chunk)
    choices(engine)
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()
    assert prompt_tokens_computed(engine) == len(PROMPT) + 2  # each follower its last token, to sample from


def test_group_shares_full_prompt_pages_and_copies_partial_page():
    engine = make_engine()
    rids = choices(engine)
    engine.step(3)
    tables = [engine.scheduler.queues.requests[RequestId(rid)].held_kv.pages for rid in rids]
    assert all(table[:3] == tables[0][:3] for table in tables)
    assert len({table[3] for table in tables}) == len(rids)


def test_group_followers_do_not_delay_other_requests():
    engine = make_engine(chunked_prefill_size=4, enable_mixed_chunk=True)
    choices(engine)
    engine.add(make_message("other", [7, 8, 9], max_tokens=2))
    engine.step(2)
    assert engine.finish("other") is not None
    assert engine.scheduler.stats().waiting == 2
    engine.run()
    engine.assert_expected()


def test_members_finish_on_their_own():
    engine = make_engine()
    rids = choices(engine)
    engine.run()
    assert [len(engine.output(rid)) for rid in rids] == [6, 7, 8]
    assert {engine.finish(rid).reason for rid in rids} == {FinishReason.LENGTH}


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("overlap", [False, True])
def test_group_is_aborted_together_at_any_time(steps: int, overlap: bool):
    engine = make_engine(enable_overlap=overlap, chunked_prefill_size=6)
    rids = choices(engine, max_tokens=30)
    engine.add(make_message("other", PROMPT, max_tokens=4))
    engine.step(steps)
    engine.scheduler.abort_group(b"", "g")
    engine.run()
    assert {engine.finish(rid).reason for rid in rids} == {FinishReason.ABORT}
    engine.assert_expected("other")
    engine.assert_nothing_held()


@pytest.mark.parametrize("steps", range(7))
def test_when_the_leader_is_aborted_the_next_one_leads(steps: int):
    engine = make_engine(enable_overlap=True, chunked_prefill_size=6)
    rids = choices(engine)
    engine.step(steps)
    engine.scheduler.abort(RequestId(rids[0]))
    engine.run()
    engine.assert_expected(*rids[1:])
    engine.assert_nothing_held()


def test_aborted_follower_leaves_the_others_alone():
    engine = make_engine()
    rids = choices(engine)
    engine.scheduler.abort(RequestId(rids[1]))
    engine.run()
    engine.assert_expected(rids[0], rids[2])
    assert engine.finish(rids[1]).reason is FinishReason.ABORT


def test_group_leader_ending_at_first_token_leaves_full_pages():
    engine = make_engine()
    rids = choices(engine, max_tokens=1)
    engine.run()
    engine.assert_expected(*rids)
    assert prompt_tokens_computed(engine) == len(PROMPT) + 2 * 2  # the half page had no owner any more


def test_groups_of_two_clients_do_not_know_each_other():
    engine = make_engine(chunked_prefill_size=4)
    choices(engine, 2, client=b"one")
    for rid in ("x", "y"):
        engine.add(make_message(rid, PROMPT, group="g"), b"two")
    engine.step()
    engine.scheduler.abort_group(b"one", "g")
    engine.run()
    engine.assert_expected("x", "y")


def test_same_group_with_other_prompt_salt_adapter_is_not_shared():
    engine = make_engine()
    choices(engine, 2)
    engine.add(make_message("stranger", [9, 9, 9], group="g"))
    engine.add(make_message("salted", PROMPT, group="g", cache_salt="s"))
    engine.add(make_message("adapted", PROMPT, group="g", adapter=ADAPTER))
    engine.run()
    engine.assert_expected()


def test_resumed_member_continues_from_its_own_tokens():
    engine = make_engine()
    choices(engine, 2)
    engine.add(make_message("resumed", PROMPT, group="g", resume=(5, 6), max_tokens=9))
    engine.run()
    engine.assert_expected()


@pytest.mark.parametrize("overlap", [False, True])
def test_members_survive_retraction(overlap: bool):
    engine = make_engine(
        enable_overlap=overlap, force_retract_every=2, max_retractions=1000, usable_pages=24, enable_mixed_chunk=True
    )
    choices(engine, 5, max_tokens=12)
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


def test_group_name_that_is_too_long_is_refused():
    engine = make_engine()
    engine.add(make_message("r", PROMPT, group="g" * 300))
    assert engine.finish().param == "group"
