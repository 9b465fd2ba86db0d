"""A mixture of experts is, for each token, the weighted sum of the experts it chose."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tandem_engine.model.layers.linear import Linear
from tandem_engine.model.layers.mlp import Expert, Router, SparseFeedForward, silu_and_multiply

HIDDEN, INNER, EXPERTS = 16, 8, 7


def weight(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(*, chosen: int = 2, normalise: bool = True) -> SparseFeedForward:
    def linear(rows: int, columns: int, seed: int) -> Linear:
        return Linear(weight=weight(rows, columns, seed=seed), bias=None)

    return SparseFeedForward(
        norm=lambda hidden: hidden,
        router=Router(weight=linear(EXPERTS, HIDDEN, 0), experts_per_token=chosen, normalise=normalise),
        experts=tuple(
            Expert(gate_up=linear(2 * INNER, HIDDEN, 10 + e), down=linear(HIDDEN, INNER, 50 + e))
            for e in range(EXPERTS)
        ),
        activation=silu_and_multiply,
    )


def one_token(moe: SparseFeedForward, token: torch.Tensor) -> torch.Tensor:
    """As one would write it on a board."""
    scores = torch.softmax(moe.router.weight(token), dim=-1)
    best = scores.topk(moe.router.experts_per_token)
    shares = best.values / best.values.sum() if moe.router.normalise else best.values
    total = torch.zeros(HIDDEN)
    for share, index in zip(shares, best.indices.tolist(), strict=True):
        gate, up = moe.experts[index].gate_up(token).chunk(2)
        total += share * moe.experts[index].down(F.silu(gate) * up)
    return total


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("chosen", [1, 3, EXPERTS])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_each_token_gets_the_weighted_sum_of_its_experts(tokens, chosen, normalise):
    moe, hidden = layer(chosen=chosen, normalise=normalise), weight(tokens, HIDDEN, seed=99)
    expected = torch.stack([one_token(moe, token) for token in hidden])
    torch.testing.assert_close(moe(hidden), expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_make_no_work():
    assert layer()(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_the_input_is_left_alone():
    moe, hidden = layer(), weight(6, HIDDEN, seed=1)
    before = hidden.clone()
    moe(hidden)
    assert torch.equal(hidden, before)


def test_an_expert_that_nobody_chose_is_not_computed():
    moe, hidden = layer(chosen=1), weight(1, HIDDEN, seed=3)
    best = int(moe.router(hidden).experts[0, 0])

    def unused(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an expert without tokens was computed")

    experts = tuple(e if i == best else Expert(gate_up=unused, down=unused) for i, e in enumerate(moe.experts))
    lazy = SparseFeedForward(norm=moe.norm, router=moe.router, experts=experts, activation=moe.activation)
    assert torch.equal(lazy(hidden), moe(hidden))
