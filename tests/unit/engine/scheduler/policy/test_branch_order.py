"""Depth first, heaviest branch first: properties of the order."""

from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.policies import Candidate, HeaviestBranchFirst
from tandem_engine.scheduler.request import Request

PAGE = 2


def candidate(number: int, blocks: list[int]) -> Candidate:
    tokens = tuple(block for block in blocks for _ in range(PAGE))
    request = Request(rid=f"r{number}", origin_input_ids=(*tokens, 9), sampling=SamplingParams(max_tokens=1))
    return Candidate(request, len(tokens))


queues = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=12).map(
    lambda prefixes: [candidate(number, blocks) for number, blocks in enumerate(prefixes)]
)


@given(queues)
def test_branch_order_is_a_permutation_of_the_queue(queue):
    assert sorted(HeaviestBranchFirst(page_size=PAGE)(queue), key=queue.index) == queue


@given(queues)
def test_requests_of_one_prefix_are_adjacent_exact_match_last(queue):
    order = [each.req.origin_input_ids[: each.cached] for each in HeaviestBranchFirst(page_size=PAGE)(queue)]
    for prefix in {tokens[:end] for tokens in order for end in range(PAGE, len(tokens) + 1, PAGE)}:
        places = [place for place, tokens in enumerate(order) if tokens[: len(prefix)] == prefix]
        assert places == [*range(places[0], places[-1] + 1)]
        ending = [place for place in places if order[place] == prefix]
        assert ending == places[len(places) - len(ending) :]


@given(queues)
def test_first_served_is_below_a_heaviest_first_block(queue):
    first_blocks = [each.req.origin_input_ids[:PAGE] for each in queue if each.cached]
    if first_blocks:
        first = HeaviestBranchFirst(page_size=PAGE)(queue)[0].req.origin_input_ids[:PAGE]
        assert first_blocks.count(first) == max(map(first_blocks.count, first_blocks))
