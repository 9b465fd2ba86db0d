import pytest
import torch

from tandem_engine.forward.batch import SamplingBatch
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.forward_builders import greedy_sampling, make_sampling
from tandem_testing.toy_grammar import make_masks


def sample(logits: torch.Tensor, sampling: SamplingBatch) -> list[int]:
    return Sampler().sample(logits, sampling).token_ids.tolist()


def draw(logits: torch.Tensor, count: int, **params: float) -> torch.Tensor:
    """Token ids of `count` positions with the same logits [V] and parameters."""
    sampling = make_sampling(
        temperature=[params.get("temperature", 1.0)] * count,
        top_k=[int(params.get("top_k", 0))] * count,
        top_p=[params.get("top_p", 1.0)] * count,
        min_p=[params.get("min_p", 0.0)] * count,
        seed=[int(params.get("seed", 11))] * count,
        position=list(range(count)),
    )
    return Sampler().sample(logits.expand(count, -1), sampling).token_ids


def chi_square(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * len(drawn)
    seen = torch.bincount(drawn, minlength=len(probabilities))
    return (((seen - expected) ** 2) / expected)[expected > 0].sum().item()


LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, -2.0, 0.5, 1.5])
CRITICAL = 24.3  # chi-square, 7 degrees of freedom, p = 0.001


@pytest.mark.parametrize("seed", [0, 1, -(2**63)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature, seed):
    drawn = draw(LOGITS, 20_000, temperature=temperature, seed=seed)
    assert chi_square(drawn, (LOGITS / temperature).softmax(0)) < CRITICAL


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.4}])
def test_filters_renormalize_and_draw_no_other_token(params):
    drawn = draw(LOGITS, 20_000, **params)
    kept = torch.zeros(8, dtype=torch.bool)
    kept[[0, 1, 2, 7]] = True
    if "min_p" in params:
        kept[[1, 2]] = False
    probabilities = LOGITS.masked_fill(~kept, -torch.inf).softmax(0)
    assert set(drawn.tolist()) == set(kept.nonzero().flatten().tolist())
    assert chi_square(drawn, probabilities) < CRITICAL


def test_unlikely_token_is_drawn_at_its_probability():
    logits = torch.tensor([0.0, -9.0])
    rare = int(draw(logits, 400_000).sum())
    expected = 400_000 * logits.softmax(0)[1].item()  # 49.4
    assert abs(rare - expected) < 4 * expected**0.5


def mixed_rows(count: int, vocab_size: int) -> tuple[torch.Tensor, SamplingBatch]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(count, vocab_size, generator=generator) * 4
    rows = range(count)
    sampling = make_sampling(
        temperature=[(0.0, 0.7, 1.0, 1.8)[row % 4] for row in rows],
        top_k=[(0, 0, 40, 1, 500)[row % 5] for row in rows],
        top_p=[(1.0, 0.9, 0.5)[row % 3] for row in rows],
        min_p=[(0.0, 0.0, 0.0, 0.05)[row // 4 % 4] for row in rows],
        seed=[row * 7919 for row in rows],
        position=[row % 3 * 1000 for row in rows],
        suppress=tuple((row, row + 1) if row % 6 == 0 else () for row in rows),
        logprobs=tuple(row % 4 - 1 for row in rows),
    )
    return logits, sampling


def only(sampling: SamplingBatch, row: int) -> SamplingBatch:
    part = slice(row, row + 1)
    return SamplingBatch(
        temperature=sampling.temperature[part],
        top_k=sampling.top_k[part],
        top_p=sampling.top_p[part],
        min_p=sampling.min_p[part],
        seed=sampling.seed[part],
        position=sampling.position[part],
        suppress=sampling.suppress[part],
        logprobs=sampling.logprobs[part],
    )


@pytest.mark.parametrize("vocab_size", [50, 4099, 40_000])
def test_company_does_not_change_a_row(vocab_size):
    logits, sampling = mixed_rows(32, vocab_size)
    together = Sampler().sample(logits, sampling)
    for row in range(32):
        alone = Sampler().sample(logits[row : row + 1], only(sampling, row))
        assert alone.token_ids.item() == together.token_ids[row].item(), row
        assert alone.logprobs[0] == together.logprobs[row], row


def test_few_kept_tokens_draw_as_all_would():
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(2)) * 3
    filtered = make_sampling(temperature=[1.0], top_k=[30], seed=[4], position=[9])
    # The unfiltered second row makes the sampler draw noise for the whole vocabulary.
    unfiltered = make_sampling(temperature=[1.0] * 2, top_k=[30, 0], seed=[4, 4], position=[9, 9])
    assert sample(logits, filtered)[0] == sample(logits.expand(2, -1), unfiltered)[0]


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    assert sample(logits, greedy_sampling(2)) == [1, 0]


def test_greedy_and_sampling_rows_share_a_batch():
    logits = LOGITS.expand(3, -1)
    sampling = make_sampling(temperature=[0.0, 1.0, 0.0], seed=[1, 2, 3])
    tokens = sample(logits, sampling)
    assert tokens[0] == tokens[2] == 0
    assert tokens[1] == sample(logits[:1], make_sampling(temperature=[1.0], seed=[2]))[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_ids_are_never_chosen(temperature):
    suppress = ((0, 7, 1, 2),) + ((),) * 63
    sampling = make_sampling(
        temperature=[temperature] * 64, position=list(range(64)), suppress=suppress, all_greedy=temperature == 0.0
    )
    assert sample(LOGITS.expand(64, -1), sampling)[0] in (3, 4, 5, 6)


@pytest.mark.parametrize("temperature", [1e-30, 1e-5])
def test_tiny_temperature_is_greedy(temperature):
    assert set(draw(LOGITS, 100, temperature=temperature).tolist()) == {0}


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
def test_extreme_logits_choose_the_largest(scale):
    logits = torch.tensor([-scale, scale / 2, scale, -torch.inf])
    assert set(draw(logits, 50).tolist()) == {2}
    assert set(draw(logits, 50, top_p=0.9, top_k=3).tolist()) == {2}


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_row_without_any_possible_token_still_gives_one(params):
    assert set(draw(torch.full((9,), -torch.inf), 3, **params).tolist()) < set(range(9))


def test_sampling_does_not_change_the_given_logits():
    logits, sampling = mixed_rows(8, 300)
    before = logits.clone()
    Sampler().sample(logits, sampling)
    assert torch.equal(logits, before)


def test_masked_row_draws_allowed_tokens_others_unchanged():  # [mask-per-row]
    logits = LOGITS.expand(3, -1)
    allowed = {2: {3, 4}, 0: {5}}
    draws = [
        sample(logits, make_sampling(temperature=[1.0] * 3, seed=[seed] * 3, masks=make_masks(allowed, words=1)))
        for seed in range(200)
    ]
    free = [sample(logits, make_sampling(temperature=[1.0] * 3, seed=[seed] * 3)) for seed in range(200)]
    assert {row[0] for row in draws} == {5}
    assert {row[2] for row in draws} == {3, 4}
    assert [row[1] for row in draws] == [row[1] for row in free]


def test_logprobs_are_those_before_the_mask():
    sampling = make_sampling(temperature=[0.0], logprobs=(1,), masks=make_masks({0: {4}}, words=1))
    output = Sampler().sample(LOGITS[None], sampling)
    assert output.token_ids.tolist() == [4]
    assert output.logprobs[0].logprob == pytest.approx(LOGITS.log_softmax(0)[4].item())
    assert output.logprobs[0].top[0][0] == 0


def test_suppressed_token_stays_suppressed_under_a_mask():
    sampling = make_sampling(temperature=[0.0], suppress=((0,),), masks=make_masks({0: {0, 4, 5}}, words=1))
    assert sample(LOGITS[None], sampling) == [4]
