"""Drafts for models with states: rejected ones leave no trace, and tokens are those of transformers."""

from dataclasses import replace

import pytest
import torch

from tandem_engine.config import (
    CacheConfig,
    DisaggConfig,
    EngineConfig,
    HostConfig,
    PreemptionMode,
    SchedulerConfig,
    SpecAlgorithm,
    SpecConfig,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.memory.state_pool import DraftedRuns, StatePool
from tandem_engine.model.layers.delta import bytes_until_verified, keep_accepted
from tandem_lab.verify.reference import TransformersReference
from tandem_testing.draft_heads import KnowingProposer, add_mtp_layer, request
from tandem_testing.exactness import run_paths_of
from tandem_testing.poisoned_states import poisoned_states
from tandem_testing.simulated_platform import SimulatedPlatform, load_simulated
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PROMPTS = [[(7 * n + 3 * at) % 250 for at in range(20 + 17 * n)] for n in range(6)]
OUTPUT = 80
"""Past a length at which a state is kept."""

PAGES = CacheConfig(num_pages=200)
PLAIN = SchedulerConfig(context_length=400, max_running_requests=4, audit_every_step=True)
SCHEDULERS = {
    "overlap": replace(PLAIN, enable_overlap=True),
    "no overlap": replace(PLAIN, enable_overlap=False),
    "retracted": replace(PLAIN, force_retract_every=3, max_retractions=1000),
    "failing": replace(PLAIN, force_fault_every=5),
    "chunked": replace(PLAIN, chunked_prefill_size=16, enable_overlap=True),
}
NGRAM = SpecConfig(algorithm=SpecAlgorithm.NGRAM, num_draft_tokens=5, adaptive=False)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def model(request, tmp_path_factory) -> LoadedModel:
    path = write_tiny_checkpoint(request.param, tmp_path_factory.mktemp("model"))
    config = EngineConfig(model_path=str(path), dtype="float32", disagg=DisaggConfig(transport="none"))
    return load(config, progress=False)


@pytest.fixture(scope="module")
def expected(model) -> list[tuple[int, ...]]:
    """Of transformers."""
    reference = TransformersReference(model.config.model_path, weights=torch.float32)
    outputs = (reference.generate(tuple(prompt), OUTPUT, frozenset(), ignore_eos=True) for prompt in PROMPTS)
    return [tuple(output.token_ids) for output in outputs]


def drafting(engine: Engine, expected, *, wrong: int = 4) -> KnowingProposer:
    """Give `engine` a proposer that knows what is expected, and errs."""
    texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=True)]
    proposer = KnowingProposer(texts, wrong=wrong)
    engine.scheduler._shared.speculation.proposer = proposer
    return proposer


def engine_of(model: LoadedModel, scheduler: SchedulerConfig, cache: CacheConfig = PAGES, platform=None) -> Engine:
    config = replace(model.config, scheduler=scheduler, cache=cache, speculative=NGRAM)
    return Engine.build(model, config, platform=platform)


def asked(wave: str = "") -> list:
    return [request(f"{wave}{n}", prompt, max_tokens=OUTPUT) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("wrong", [1, 2, 4, 1000])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_tokens_with_rejected_drafts_are_those_of_transformers(model, expected, name, wrong):
    with engine_of(model, SCHEDULERS[name]) as engine:
        proposer = drafting(engine, expected, wrong=wrong)
        found = [output.token_ids for output in engine.generate(asked(), steps_between=2)]
        stats = engine.stats()
        assert engine.audit().problems == ()
    assert found == expected
    drafted, accepted = stats.speculation.drafted_total, stats.speculation.accepted_total
    assert drafted > 100
    assert (accepted == 0) is (wrong == 1)
    assert (accepted < drafted) is (wrong < 1000)
    assert min(proposer.lengths) < max(proposer.lengths) == NGRAM.num_draft_tokens


def test_drafts_end_where_states_are_kept(model, expected):
    """The second wave continues each text at the newest such length, which its output has passed."""
    with engine_of(model, PLAIN) as engine:
        drafting(engine, expected)
        engine.generate(asked())
        texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=True)]
        turns = [request(f"turn {n}", [*text, 1, 2], max_tokens=4) for n, text in enumerate(texts)]
        again = engine.generate(turns)
    assert [output.cached_tokens for output in again] == [(len(text) - 1) // 64 * 64 for text in texts]
    with Engine.build(model, replace(model.config, scheduler=PLAIN, cache=PAGES)) as plain:
        alone = plain.generate(turns)
    assert [output.token_ids for output in again] == [output.token_ids for output in alone]


def test_swapped_states_of_drafting_requests_come_back(model, expected):
    """Every row has NaN when it is given out."""
    scheduler = replace(
        PLAIN, force_retract_every=2, max_retractions=1000, preemption_mode=PreemptionMode.SWAP, enable_overlap=False
    )
    cache = replace(PAGES, host=HostConfig(swap_bytes=16 << 20))
    with engine_of(model, scheduler, cache) as engine:
        drafting(engine, expected)
        with poisoned_states(engine):
            found = [output.token_ids for output in engine.generate(asked())]
        assert engine.scheduler.stats().swapped_in_total > 10
    assert found == expected


@pytest.mark.slow
def test_queued_steps_of_drafts_leave_states_to_acceptance(tmp_path):
    """On a device that queues: verification is no graph of decodes, which would change states."""
    checkpoint = write_tiny_checkpoint("qwen3.5", tmp_path)
    model = load_simulated(checkpoint)
    reference = TransformersReference(str(checkpoint), weights=torch.float32)
    expected = [
        tuple(reference.generate(tuple(prompt), OUTPUT, frozenset(), ignore_eos=True).token_ids) for prompt in PROMPTS
    ]
    platform = SimulatedPlatform()
    with engine_of(model, PLAIN, platform=platform) as engine:
        drafting(engine, expected)
        found = [output.token_ids for output in engine.generate(asked(), steps_between=2)]
    assert found == expected


def test_memory_planned_for_drafts_equals_step_usage(model, expected, monkeypatch):
    """With what moving all layers on takes, which is about as much again."""
    shares: list[float] = []

    def measured(pool: StatePool, drafted: DraftedRuns, lens: torch.Tensor, *, longest: int) -> None:
        sequences, tokens = drafted.tokens.shape
        kept = sum(part.nbytes for layer in drafted.layers for part in layer)
        states = sequences * pool.spec.slot_bytes
        planned = bytes_until_verified(pool.spec, sequences=sequences, tokens=tokens)
        shares.append(planned / (2 * kept + states))
        keep_accepted(pool, drafted, lens, longest=longest)

    monkeypatch.setattr("tandem_engine.executor.runner.keep_accepted", measured)
    with engine_of(model, PLAIN) as engine:
        drafting(engine, expected)
        engine.generate(asked()[:2])
    assert shares == [pytest.approx(1.0, rel=1e-3)] * len(shares) != []


@pytest.mark.slow
def test_queued_step_of_drafts_that_raises_keeps_nothing(tmp_path, monkeypatch):
    """The runs of its requests apart, which follow, have the memory."""
    model = load_simulated(write_tiny_checkpoint("qwen3.5", tmp_path))
    reference = TransformersReference(model.config.model_path, weights=torch.float32)
    output = reference.generate(tuple(PROMPTS[0]), OUTPUT, frozenset(), ignore_eos=True).token_ids
    with engine_of(model, PLAIN, platform=SimulatedPlatform()) as engine:
        drafting(engine, [tuple(output)] * len(PROMPTS))
        runner = engine._parts.runner
        sample, kept_after = runner.sampler.sample, []

        def fail_once(logits, inputs, masks):
            if inputs.batch.draft_lens and not kept_after:
                kept_after.append("raised")
                raise RuntimeError("no memory")
            if len(kept_after) == 1:
                kept_after.append(runner._drafted)
            return sample(logits, inputs, masks)

        monkeypatch.setattr(runner.sampler, "sample", fail_once)
        [found] = engine.generate(asked()[:1])
    assert kept_after == ["raised", None]
    assert found.token_ids == tuple(output)


HEAD_PATHS = [
    "EAGLE drafts",
    "EAGLE drafts, prefix-cached",
    "EAGLE drafts, retracted",
    "EAGLE drafts, handed over",
    "EAGLE drafts, 2 ranks",
]


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_paths_with_a_layer_ahead_are_those_of_transformers(family, tmp_path):
    """The layer is random, so nearly all drafts are rejected."""
    checkpoint = add_mtp_layer(write_tiny_checkpoint(family, tmp_path / "model"))
    model = load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)
    (tmp_path / "model-eagle").symlink_to(checkpoint)
    results = run_paths_of(model, HEAD_PATHS, every=3)
    assert {result.path: result.difference for result in results} == dict.fromkeys(HEAD_PATHS)
