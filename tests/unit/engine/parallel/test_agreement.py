"""`agree`: every rank gets rank 0's turn, whatever it has itself."""

import torch

from tandem_engine.messages.control import AbortRequests, Drain
from tandem_engine.parallel.agreement import GATHERED_BYTES, INLINE_BYTES, Agreement, Turn
from tandem_engine.parallel.group import Parallel, SingleRank, agree_on_step
from tandem_engine.parallel.inputs import Add, Input
from tandem_engine.scheduler.speculation import StepDrafts
from tandem_testing.rank_threads import on_ranks
from tandem_testing.scheduler_builders import make_message


def turns(*proposals: tuple[float, list[Input]]) -> list[Turn]:
    """What each rank gets from `agree` when rank i proposes `proposals[i]`."""

    def work(parallel: Parallel) -> Turn:
        now, inputs = proposals[parallel.rank]
        return Agreement(parallel.schedule).agree(now=now, inputs=inputs)

    return on_ranks(len(proposals), work)


def test_all_ranks_get_rank_0s_inputs_in_order_and_its_time():
    inputs: list[Input] = [Add(message=make_message("a"), client=b"\x00gateway"), AbortRequests(rid="a"), Drain()]
    expected = Turn(now=12.5, inputs=tuple(inputs))
    assert turns((12.5, inputs), (99.0, [AbortRequests(rid="other")])) == [expected, expected]


def test_prompt_longer_than_the_first_message_arrives_whole():
    message = make_message("long", range(3 * INLINE_BYTES))
    first, second = turns((0.0, [Add(message=message, client=b"")]), (0.0, []))
    assert first == second
    assert first.inputs == (Add(message=message, client=b""),)


def test_agreed_inputs_of_varying_sizes_do_not_mix():
    sizes = (INLINE_BYTES * 2, 0, 100, INLINE_BYTES - 40, 1)

    def work(parallel: Parallel) -> list[int]:
        agreement = Agreement(parallel.schedule)
        got = [agreement.agree(now=0.0, inputs=[AbortRequests(rid="x" * size)]) for size in sizes]
        return [
            len(item.rid)
            for turn in got
            for item in turn.inputs
            if isinstance(item, AbortRequests) and item.rid is not None
        ]

    assert on_ranks(2, work) == [list(sizes)] * 2


def test_drafts_are_rank_0s():  # [rank-zero-drafts]
    proposals = (StepDrafts(chains=((4, 5), ()), propose_s=0.25), StepDrafts(chains=((9,), (8,)), propose_s=9.0))
    assert on_ranks(2, lambda p: Agreement(p.schedule).share(proposals[p.rank], StepDrafts)) == [proposals[0]] * 2


def test_rank_that_is_alone_shares_with_itself():
    drafts = StepDrafts(chains=((1,),))
    assert Agreement(SingleRank()).share(drafts, StepDrafts) is drafts


def test_fact_counts_when_it_holds_on_every_rank():  # [least-of-ranks] [record-after-writes]
    progress = ((1, 3), (0, 7), (1, 5))
    assert on_ranks(3, lambda p: Agreement(p.schedule).least(progress[p.rank])) == [[0, 3]] * 3


def test_agreement_without_values_exchanges_no_message():
    assert Agreement(SingleRank(rank=1, size=2)).least([]) == []


def test_tokens_and_time_of_rank_0_reach_all_ranks():  # [rank-zero-tokens]
    def work(parallel: Parallel) -> tuple[list[int], float]:
        sampled = torch.tensor([5, 6 + parallel.rank, 7])
        facts = agree_on_step(parallel.forward, sampled, 0.25 * (1 + parallel.rank))
        return facts.token_ids.tolist(), facts.compute_s

    assert on_ranks(2, work) == [([5, 6, 7], 0.25)] * 2


def test_step_that_samples_nothing_agrees_on_its_time():
    facts = on_ranks(2, lambda p: agree_on_step(p.forward, torch.empty(0, dtype=torch.int64), 1.0 + p.rank))
    assert [(len(fact.token_ids), fact.compute_s) for fact in facts] == [(0, 1.0)] * 2


def test_gather_returns_values_of_all_ranks():
    output = {0: "a", 1: "", 2: "b" * 3 * GATHERED_BYTES}

    def work(parallel: Parallel) -> list[list[str]]:
        agreement = Agreement(parallel.schedule)
        return [agreement.gather(output[parallel.rank], str), agreement.gather(str(parallel.rank), str)]

    assert on_ranks(3, work) == [[[*output.values()], ["0", "1", "2"]]] * 3


def test_gather_on_single_rank_returns_own_value():
    value = object()
    assert Agreement(SingleRank()).gather(value, object) == [value]
