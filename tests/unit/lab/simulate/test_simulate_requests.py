"""Prompts of a trace hash to the chain that the router computes; conversations are told apart."""

from tandem_engine.messages.kv_events import chain_hashes, chain_seed
from tandem_lab.simulate.requests import simulated_requests
from tandem_lab.traces import TRACE_BLOCK, TraceRow


def row(at: float, blocks: tuple[int, ...], short: int = 0) -> TraceRow:
    return TraceRow(at=at, prompt_tokens=len(blocks) * TRACE_BLOCK - short, output_tokens=5, blocks=blocks)


def test_request_chain_hashes_full_blocks_of_token_ids():
    (request,) = simulated_requests([row(0.0, (0, 7, 300), short=1)], limit=None, speed=1.0)
    tokens = request.token_ids()
    assert len(tokens) == request.prompt_tokens == 3 * TRACE_BLOCK - 1
    assert list(request.chain) == chain_hashes(tokens, TRACE_BLOCK, parent=chain_seed(""))
    assert len(request.chain) == 2


def test_equal_leading_blocks_have_equal_digests():
    first, second = simulated_requests([row(0.0, (0, 1, 2)), row(0.0, (0, 1, 3))], limit=None, speed=1.0)
    assert first.chain[:2] == second.chain[:2]
    assert first.chain[2] != second.chain[2]


def test_arrivals_are_ordered_from_zero_and_sped_up():
    requests = simulated_requests([row(30.0, (1,)), row(10.0, (2,)), row(20.0, (3,))], limit=None, speed=2.0)
    assert [(request.at, request.blocks) for request in requests] == [(0.0, (2,)), (5.0, (3,)), (10.0, (1,))]
    assert len(simulated_requests([row(1.0, (1,))] * 5, limit=2, speed=1.0)) == 2


def test_sessions_are_grouped_by_shared_blocks_after_the_first():
    turns = [(0, 1), (0, 2), (0, 1, 5), (0, 2, 6), (0, 1, 5, 8), (9,)]
    sessions = [r.session for r in simulated_requests([row(0.0, blocks) for blocks in turns], limit=None, speed=1.0)]
    assert sessions[0] == sessions[2] == sessions[4]
    assert sessions[1] == sessions[3]
    assert len(set(sessions)) == 3
