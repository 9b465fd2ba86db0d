"""A mixture of experts is, for each token, the weighted sum of the experts it chose."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tandem_engine.config import Scoring
from tandem_engine.model.layers.linear import Linear
from tandem_engine.model.layers.mlp import Expert, Router, SharedBlock, SparseFeedForward, silu_and_multiply

HIDDEN, INNER, EXPERTS = 16, 8, 7


def weight(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(*, chosen: int = 2, normalize: bool = True) -> SparseFeedForward:
    def linear(rows: int, columns: int, seed: int) -> Linear:
        return Linear(weight=weight(rows, columns, seed=seed), bias=None)

    return SparseFeedForward(
        norm=lambda hidden: hidden,
        router=Router(weight=linear(EXPERTS, HIDDEN, 0), experts_per_token=chosen, normalize=normalize),
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
    shares = best.values / best.values.sum() if moe.router.normalize else best.values
    total = torch.zeros(HIDDEN)
    for share, index in zip(shares, best.indices.tolist(), strict=True):
        gate, up = moe.experts[index].gate_up(token).chunk(2)
        total += share * moe.experts[index].down(F.silu(gate) * up)
    return total


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("chosen", [1, 3, EXPERTS])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_each_token_gets_the_weighted_sum_of_its_experts(tokens, chosen, normalize):
    moe, hidden = layer(chosen=chosen, normalize=normalize), weight(tokens, HIDDEN, seed=99)
    expected = torch.stack([one_token(moe, token) for token in hidden])
    torch.testing.assert_close(moe(hidden), expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_make_no_work():
    assert layer()(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_expert_layer_does_not_change_its_input():
    moe, hidden = layer(), weight(6, HIDDEN, seed=1)
    before = hidden.clone()
    moe(hidden)
    assert torch.equal(hidden, before)


def test_expert_without_tokens_is_not_computed():
    moe, hidden = layer(chosen=1), weight(1, HIDDEN, seed=3)
    best = int(moe.router(hidden).experts[0, 0])

    def unused(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an expert without tokens was computed")

    experts = tuple(e if i == best else Expert(gate_up=unused, down=unused) for i, e in enumerate(moe.experts))
    lazy = SparseFeedForward(norm=moe.norm, router=moe.router, experts=experts, activation=moe.activation)
    assert torch.equal(lazy(hidden), moe(hidden))


def router(**fields) -> Router:
    gate = Linear(weight=weight(8, HIDDEN, seed=3), bias=None)
    return Router(weight=gate, experts_per_token=2, normalize=True, **fields)


def test_bias_chooses_experts_and_does_not_weigh_them():
    x = weight(5, HIDDEN, seed=4)
    bias = torch.zeros(8)
    bias[6] = 10.0
    plain, biased = router(scoring=Scoring.SIGMOID), router(scoring=Scoring.SIGMOID, bias=bias, scale=2.5)
    scores = (x @ weight(8, HIDDEN, seed=3).T).sigmoid()
    experts, weights = biased(x)
    assert (experts[:, 0] == 6).all()
    assert torch.equal(experts[:, 1], scores.index_fill(1, torch.tensor([6]), 0).argmax(dim=1))
    chosen = scores.gather(1, experts)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(dim=1, keepdim=True))
    assert not torch.equal(plain(x).experts, experts)


def test_experts_come_from_the_groups_with_the_best_pairs():
    """Four groups of two, of which one is kept: the one whose sum is largest, not the one with the best expert."""
    logits = torch.tensor([[4.0, -9.0, 1.0, 2.0, 2.5, 2.4, 0.0, 0.0]])
    chosen = Router(
        weight=lambda _: logits, experts_per_token=2, normalize=False, scoring=Scoring.SIGMOID, groups=4, kept_groups=1
    )(torch.zeros(1, HIDDEN))
    assert chosen.experts.tolist() == [[4, 5]]
    torch.testing.assert_close(chosen.weights, logits.sigmoid()[:, 4:6])


def test_no_tokens_choose_no_experts():
    chosen = router(groups=4, kept_groups=2, bias=torch.zeros(8))(torch.zeros(0, HIDDEN))
    assert chosen.experts.shape == (0, 2)


def test_weights_of_no_sum_are_divided_by_the_least_sum():
    logits = torch.full((1, 8), -200.0)
    chosen = Router(
        weight=lambda _: logits, experts_per_token=2, normalize=True, scoring=Scoring.SIGMOID, least_sum=1e-20
    )(torch.zeros(1, HIDDEN))
    assert chosen.weights.isfinite().all()


def test_gate_of_a_shared_block_multiplies_its_result():
    def linear(rows: int, columns: int, seed: int) -> Linear:
        return Linear(weight=weight(rows, columns, seed=seed), bias=None)

    block = SharedBlock(
        gate_up=linear(2 * INNER, HIDDEN, 90),
        activation=silu_and_multiply,
        down=linear(HIDDEN, INNER, 91),
        gate=linear(1, HIDDEN, 92),
    )
    x = weight(3, HIDDEN, seed=5)
    plain = replace(block, gate=None)(x)
    torch.testing.assert_close(block(x), plain * (x @ weight(1, HIDDEN, seed=92).T).sigmoid())
    moe = layer()
    torch.testing.assert_close(replace(moe, shared=block)(x), moe(x) + block(x))
