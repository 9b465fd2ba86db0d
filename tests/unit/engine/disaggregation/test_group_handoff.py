"""Choices of one answer that go from one worker to another: the prompt is computed once and moves once."""

from tandem_engine.messages.outputs import TransferReport
from tandem_testing.disagg_pair import Pair, make_pair

PROMPT = tuple(range(1, 15))
"""Three whole pages of four tokens and a half."""


def choices(pair: Pair, count: int = 3) -> list[str]:
    return [pair.submit(f"c{i}", PROMPT, group="g", temperature=0.8, seed=i, max_tokens=6) for i in range(count)]


def report(pair: Pair, rid: str) -> TransferReport:
    return next(o.transfer for o in pair.decode.engine.received[rid].outputs if o.transfer is not None)


def test_group_followers_receive_only_unshared_pages():
    pair = make_pair()
    rids = choices(pair)
    pair.run()
    assert [report(pair, rid).pages for rid in rids] == [4, 1, 1]
    assert [report(pair, rid).pages_reused for rid in rids] == [0, 3, 3]
    assert all(pair.decode.engine.output(rid) == pair.expected(rid) for rid in rids)
    pair.assert_clean()


def test_prompt_is_computed_once():
    pair = make_pair()
    choices(pair)
    pair.run()
    extends = [batch for batch in pair.prefill.engine.executor.batches if batch.num_extend]
    assert sum(batch.num_tokens for batch in extends) == len(PROMPT) + 2


def test_request_does_not_wait_for_group_in_transfer():
    pair = make_pair()
    first, *_ = choices(pair)
    pair.submit("other", (50, 51, 52), max_tokens=3)
    pair.turn()
    receiving = {*pair.decode.stage.live()} - {entry.req for entry in pair.decode.stage.decode.prealloc}
    assert {req.rid for req in receiving} == {first, "other"}
    pair.run()
    pair.assert_clean()


def test_next_choice_receives_prompt_after_abort_of_first():
    pair = make_pair()
    first, second, third = choices(pair)
    pair.turn()
    pair.decode.engine.scheduler.abort(first)
    pair.prefill.engine.scheduler.abort(first)
    pair.run()
    for rid in (second, third):
        assert pair.decode.engine.output(rid) == pair.expected(rid)
    pair.assert_clean()
