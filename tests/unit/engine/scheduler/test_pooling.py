"""What a request for an embedding may ask for, and how its vector is made."""

import struct

import msgspec
import pytest
import torch

from tandem_engine.forward.results import PooledSum, PooledTokens, sum_pooled
from tandem_engine.messages.requests import Handoff, HandoffSide, Peer, Pooling, PoolingParams, SessionRef
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.scheduler.prompt_results import PooledPrompt
from tandem_testing.embedding_builders import make_embedding_request
from tandem_testing.scheduler_builders import make_engine

HANDOFF = Handoff(
    side=HandoffSide.SEND,
    room="r",
    generation=1,
    peer=Peer(worker_id="w", incarnation="w@1", endpoint="tcp://127.0.0.1:1", compat_hash="x"),
)


def pooled(pooling: Pooling, prompt_len: int, **params: object) -> PooledPrompt:
    prompt = PooledPrompt.wanted_by(PoolingParams(pooling=pooling, **params), prompt_len)
    assert prompt is not None
    return prompt


def part(first: int, *rows: tuple[float, ...]) -> PooledSum:
    total = torch.tensor(rows, dtype=torch.float64).sum(dim=0)
    return PooledSum(sequence=0, first=first, count=len(rows), total=total)


@pytest.mark.parametrize(
    ("pooling", "wanted"), [(Pooling.LAST, range(9, 10)), (Pooling.MEAN, range(10)), (Pooling.CLS, range(1))]
)
def test_each_pooling_kind_selects_its_tokens(pooling, wanted):
    assert pooled(pooling, 10).positions(0, 10) == wanted


def test_steps_yield_missing_pooled_tokens():
    prompt = pooled(Pooling.MEAN, 10)
    assert prompt.positions(0, 4) == range(4)
    prompt.take(part(0, (1.0,), (2.0,), (3.0,), (4.0,)))
    assert prompt.positions(2, 7) == range(4, 7)
    assert prompt.longest_match == 4
    assert not prompt.complete


def test_mean_over_parts_is_cut_and_scaled():
    prompt = pooled(Pooling.MEAN, 3, dimensions=2)
    prompt.take(part(0, (1.0, 2.0, 50.0)))
    prompt.take(part(1, (4.0, 5.0, 50.0), (4.0, 5.0, 50.0)))
    assert prompt.longest_match is None
    assert struct.unpack("<2f", prompt.embedding()) == pytest.approx((0.6, 0.8))


def test_vector_of_zeros_stays_one():
    prompt = pooled(Pooling.LAST, 1)
    prompt.take(part(0, (0.0, 0.0)))
    assert struct.unpack("<2f", prompt.embedding()) == (0.0, 0.0)


def test_sums_are_wider_than_the_hidden_states():
    hidden = torch.full((4097, 1), 1.001, dtype=torch.bfloat16)
    (result,) = sum_pooled(hidden, (PooledTokens(sequence=2, first=7, tokens=torch.arange(4097)),))
    assert (result.sequence, result.first, result.count) == (2, 7, 4097)
    assert float(result.total) == 4097 * float(hidden[0, 0])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"pooling": PoolingParams(dimensions=3)}, "dimensions"),
        ({"pooling": PoolingParams(dimensions=0)}, "dimensions"),
        ({"sampling": SamplingParams(max_tokens=2)}, "pooling"),
        ({"resume_ids": (4,)}, "pooling"),
        ({"handoff": HANDOFF}, "handoff"),
        ({"input_ids": ()}, "input_ids"),
    ],
)
def test_unsupported_embedding_option_is_rejected_by_name(changes, param):
    engine = make_engine()
    engine.add(msgspec.structs.replace(make_embedding_request("r", [1, 2], Pooling.LAST), **changes))
    assert engine.finish().code == "invalid_request"
    assert engine.finish().param == param
    assert not engine.finish().retryable


def test_embedding_is_no_turn_of_a_conversation():
    engine = make_engine(session_pages=8)
    engine.add(
        msgspec.structs.replace(make_embedding_request("r", (1, 2, 3), Pooling.LAST), session=SessionRef(id="s"))
    )
    finish = engine.finish("r")
    assert finish.code == "invalid_request"
    assert finish.param == "session"
    assert len(engine.scheduler.sessions) == 0
