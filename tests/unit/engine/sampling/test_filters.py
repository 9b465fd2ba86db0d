import math

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tandem_engine.sampling.sampler import FIRST_RANKED, keep_thresholds

NOTHING = (0, 1.0, 0.0)


class OnTheEdgeError(Exception):
    """The answer hangs on rounding; both are right."""


def kept_by_definition(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters one after the other, as their documentation says, ties with the last kept token included."""
    kept = set(range(len(logits)))
    if top_k:
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        kept = {i for i in kept if logits[i] >= kth}
    mass = sum(math.exp(logits[i]) for i in kept)
    before, last = 0.0, -math.inf
    for i in sorted(kept, key=lambda i: -logits[i]) if top_p < 1.0 else ():
        if before != 0.0 and abs(before - top_p * mass) < 2e-6 * mass:
            raise OnTheEdgeError
        if before < top_p * mass:
            last = logits[i]
        before += math.exp(logits[i])
    return {i for i in kept if logits[i] >= last and math.exp(logits[i] - max(logits)) >= min_p}


def kept(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    thresholds = keep_thresholds(
        logits[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p], dtype=torch.float32)
    )
    if thresholds is None:
        return set(range(len(logits)))
    return set((logits >= thresholds[0]).nonzero().flatten().tolist())


def as_scaled(values: list[int]) -> torch.Tensor:
    """Halves of small integers, so that equals are common, with the largest at 0."""
    logits = torch.tensor(values, dtype=torch.float32) / 2
    return logits - logits.max()


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.0625, 0.984375, width=32)),
    min_p=st.one_of(st.just(0.0), st.sampled_from([0.03, 0.1, 0.3, 0.7])),
)
def test_filters_keep_tokens_of_their_definition(values, top_k, top_p, min_p):
    logits = as_scaled(values)
    try:
        expected = kept_by_definition(logits.tolist(), top_k, top_p, min_p)
    except OnTheEdgeError:
        reject()
    assert kept(logits, top_k, top_p, min_p) == expected


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.97, 0.996])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_k", [0, 5, FIRST_RANKED + 50])
def test_sorting_a_part_of_the_vocabulary_is_enough_or_widened(top_p, spread, top_k):
    logits = torch.randn(FIRST_RANKED * 12, generator=torch.Generator().manual_seed(0)) * spread
    logits -= logits.max()
    assert kept(logits, top_k, top_p, 0.0) == kept_by_definition(logits.tolist(), top_k, top_p, 0.0)


def test_ties_beyond_the_sorted_part_count_towards_top_p():
    logits = torch.zeros(FIRST_RANKED * 3)
    logits[0] = 1.0
    logits -= 1.0
    # Top-k of 2 keeps every tie with the second; half of that mass is then many tokens, all equal.
    assert len(kept(logits, 2, 0.5, 0.0)) == len(logits)


def test_filter_thresholds_of_a_row_do_not_depend_on_other_rows():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 3000, generator=generator) * torch.linspace(0.01, 8, 40)[:, None]
    logits -= logits.amax(dim=1, keepdim=True)
    top_k = torch.arange(40) % 7 * 100
    top_p = torch.linspace(0.05, 1.2, 40).clamp(max=1.0)
    min_p = torch.zeros(40)
    together = keep_thresholds(logits, top_k, top_p, min_p)
    for row in range(40):
        part = slice(row, row + 1)
        alone = keep_thresholds(logits[part], top_k[part], top_p[part], min_p[part])
        assert (-torch.inf if alone is None else alone.item()) == together[row].item()


def test_no_filter_costs_nothing():
    assert keep_thresholds(torch.zeros(2, 10), torch.tensor([0, 10]), torch.ones(2), torch.zeros(2)) is None
