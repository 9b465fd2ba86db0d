import pytest
import torch

from tandem_engine.forward.batch import RESOLVE
from tandem_engine.forward.future_map import FutureMap, token_rows
from tandem_testing.forward_builders import Seq, make_batch


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture(params=[False, True], ids=["plain", "debug"])
def future_map(request) -> FutureMap:
    return FutureMap(8, debug=request.param)


def test_resolve_fills_tokens_published_on_device(future_map):
    future_map.publish(ints(3, 8), ints(30, 80))
    assert future_map.resolve(ints(5, RESOLVE, 6, RESOLVE), ints(1, 8, 1, 3)).tolist() == [5, 80, 6, 30]


def test_row_holds_the_newest_token(future_map):
    future_map.publish(ints(2), ints(10))
    future_map.publish(ints(2), ints(11))
    assert future_map.resolve(ints(RESOLVE), ints(2)).tolist() == [11]


def test_resolve_does_not_change_the_given_ids(future_map):
    ids = ints(RESOLVE)
    future_map.publish(ints(1), ints(4))
    future_map.resolve(ids, ints(1))
    assert ids.tolist() == [RESOLVE]


def test_token_is_consumed_once():
    future_map = FutureMap(4, debug=True)
    future_map.publish(ints(2), ints(9))
    future_map.resolve(ints(RESOLVE), ints(2))
    with pytest.raises(AssertionError, match=r"rows \[2\] have no token"):
        future_map.resolve(ints(RESOLVE), ints(2))


def test_token_is_not_resolved_twice_in_one_step():
    future_map = FutureMap(4, debug=True)
    future_map.publish(ints(2), ints(9))
    with pytest.raises(AssertionError, match="twice in one step"):
        future_map.resolve(ints(RESOLVE, RESOLVE), ints(2, 2))


def test_known_input_id_consumes_nothing():
    future_map = FutureMap(4, debug=True)
    future_map.publish(ints(2), ints(9))
    future_map.resolve(ints(7), ints(2))
    assert future_map.resolve(ints(RESOLVE), ints(2)).tolist() == [9]


def test_every_token_of_a_step_maps_to_its_row():
    sequences = [
        Seq(seq_len=5, extend_len=3, row=7, pages=[1]),
        Seq(seq_len=2, extend_len=2, row=4, pages=[2]),
        Seq(seq_len=9, decode=True, row=5, pages=[3]),
    ]
    assert token_rows(make_batch(sequences)).tolist() == [7, 7, 7, 4, 4, 5]
    assert token_rows(make_batch(sequences[2:])).tolist() == [5]
