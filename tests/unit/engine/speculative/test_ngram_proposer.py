from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.speculative.interface import DraftRequest
from tandem_engine.speculative.ngram import NgramProposer
from tandem_testing.draft_builders import DraftBench


def test_proposals_come_from_text_of_each_request():
    bench = DraftBench()
    proposer = NgramProposer(shortest=2, longest=4)
    repeating, fresh = bench.request([1, 2, 3, 1, 2], limit=2), bench.request([5, 6, 7, 8])
    assert proposer.ready(repeating)
    assert not proposer.ready(fresh)
    assert proposer.propose([repeating, fresh]).chains == ((3, 1), ())


def test_new_tokens_are_added_to_index():
    bench = DraftBench()
    proposer = NgramProposer(shortest=2, longest=4)
    text = [1, 2, 3, 4]
    request = bench.request(text)
    asked: list[tuple[int, int]] = []

    def token_ids(start: int, stop: int) -> list[int]:
        asked.append((start, stop))
        return text[start:stop]

    for token in (1, 2):
        text.append(token)
        proposer.propose(
            [DraftRequest(kv=request.kv, seq_len=len(text), token_ids=token_ids, sampling=greedy(), limit=1)]
        )
    assert asked == [(0, 5), (5, 6)]


def test_row_that_was_given_back_is_forgotten():  # [row-state-forgotten]
    bench = DraftBench()
    proposer = NgramProposer(shortest=2, longest=4)
    first = bench.request([1, 2, 3, 1, 2])
    assert proposer.propose([first]).chains[0]
    proposer.release(first.kv, [])
    bench.memory.release(first.kv, (), checkpoint=False, after_step=None)
    second = bench.request([9, 8, 1, 2])
    assert second.kv.row == first.kv.row
    assert proposer.propose([second]).chains == ((),)


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=99, temperature=0.0)
