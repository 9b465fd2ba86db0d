"""Drafts on real models: outputs are those without drafts, whatever the proposer and however tokens are chosen."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpecAlgorithm, SpecConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.messages.stats import SpeculationStats
from tandem_engine.model.decoder import Decoder
from tandem_engine.speculative.assembly import read_draft
from tandem_engine.speculative.draft_model import ModelProposer
from tandem_engine.speculative.eagle import load_head, read_head_config
from tandem_engine.speculative.interface import DraftRequest, DraftTokens
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.tiny_checkpoints import VOCAB_SIZE, write_tiny_checkpoint, write_tiny_head

FAMILY = "qwen3"
NONE = SpecConfig()


class Checkpoints:
    """A model, one of the same vocabulary that knows nothing of it, and a head."""

    def __init__(self, folder: Path) -> None:
        self.model = write_tiny_checkpoint(FAMILY, folder / "model")
        self.stranger = write_tiny_checkpoint("llama-bias", folder / "stranger", seed=9)
        self.head = write_tiny_head(self.model, folder / "head")
        self.loaded: LoadedModel = load(EngineConfig(model_path=str(self.model), dtype="float32"), progress=False)

    def spec(self, name: str, *, adaptive: bool = False) -> SpecConfig:
        algorithm, path = {
            "ngram": (SpecAlgorithm.NGRAM, ""),
            "itself": (SpecAlgorithm.DRAFT, self.model),
            "stranger": (SpecAlgorithm.DRAFT, self.stranger),
            "eagle": (SpecAlgorithm.EAGLE, self.head),
        }[name]
        return SpecConfig(
            algorithm=algorithm, draft_model_path=str(path), prompt_lookup_min=1, num_draft_tokens=3, adaptive=adaptive
        )

    def engine(self, spec: SpecConfig, *, page_size: int = 16, **scheduler: object) -> Engine:
        settings = {"context_length": 200, "audit_every_step": True, "enable_overlap": False, **scheduler}
        config = replace(
            self.loaded.config,
            speculative=spec,
            cache=CacheConfig(page_size=page_size, num_pages=2 + 1600 // page_size),
            scheduler=SchedulerConfig(**settings),
        )
        return Engine.build(self.loaded, config)

    def run(self, spec: SpecConfig, requests: Sequence[GenerateRequest], **options: object) -> list[Generation]:
        with self.engine(spec, **options) as engine:
            return engine.generate(requests, steps_between=2)

    def run_with_stats(
        self, spec: SpecConfig, requests: Sequence[GenerateRequest], **options: object
    ) -> tuple[list[Generation], SpeculationStats]:
        with self.engine(spec, **options) as engine:
            return engine.generate(requests, steps_between=2), engine.stats().speculation


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("speculation"))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def request(rid: str, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    params = {"max_tokens": 24, "temperature": 0.0, "logprobs": 1, "ignore_eos": True, **sampling}
    return GenerateRequest(rid=rid, input_ids=tuple(prompt), sampling=SamplingParams(**params))


def workload() -> list[GenerateRequest]:
    """Greedy and sampled with every filter, repetitive and not, sharing prefixes."""
    shared = [7, 8, 9, 10, 11, 12, 13] * 6
    return [
        request("greedy", shared),
        request("hot", [*shared, 1], temperature=1.0, seed=1),
        request("top-k", [5, 6, 7], temperature=0.8, top_k=20, seed=2),
        request("top-p", [*shared[:33], 2], temperature=1.2, top_p=0.8, seed=3),
        request("min-p", range(3, 60), temperature=0.9, min_p=0.05, seed=4),
        request("stops", [*shared, 4], temperature=1.0, seed=5, stop_token_ids=(3, 50, 200), min_tokens=6),
        request("cold", range(100, 140), temperature=0.05, seed=6),
    ]


def assert_same(mine: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.token_ids == other.token_ids, one.rid
        assert one.finish == other.finish, one.rid
        torch.testing.assert_close(
            [entry.logprob for entry in one.logprobs], [entry.logprob for entry in other.logprobs], atol=1e-4, rtol=0
        )
        assert [entry.top[0][0] for entry in one.logprobs] == [entry.top[0][0] for entry in other.logprobs]


NAMES = ["ngram", "itself", "stranger", "eagle"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_overlap": True, "chunked_prefill_size": 16},
        {"page_size": 1, "force_retract_every": 3, "max_retractions": 1000},
        {"page_size": 64, "enable_mixed_chunk": False},
    ],
    ids=["plain", "overlap, chunked", "page 1, retracted", "page 64"],
)
def test_sampled_tokens_are_those_of_no_drafts(checkpoints, name, options):
    plain = checkpoints.run(NONE, workload())
    drafted, stats = checkpoints.run_with_stats(checkpoints.spec(name), workload(), **options)
    assert stats.drafted_total > 0
    assert_same(drafted, plain)


@pytest.mark.parametrize("name", NAMES)
def test_adapting_lengths_change_no_token(checkpoints, name):
    plain = checkpoints.run(NONE, workload())
    assert_same(checkpoints.run(checkpoints.spec(name, adaptive=True), workload()), plain)


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "force_retract_every": 4, "max_retractions": 1000}])
def test_model_that_drafts_for_itself_is_always_right(checkpoints, options):
    """With the noise of the target, at any temperature; it does not get min_tokens alone, and would stop."""
    requests = [one for one in workload() if not one.sampling.min_tokens]
    _, stats = checkpoints.run_with_stats(checkpoints.spec("itself"), requests, **options)
    assert stats.accepted_total == stats.drafted_total
    assert stats.accept_length > 3.0


def test_unrelated_draft_model_has_low_acceptance(checkpoints):
    _, stats = checkpoints.run_with_stats(checkpoints.spec("stranger"), workload())
    assert stats.accepted_total < 0.3 * stats.drafted_total


@pytest.mark.parametrize("name", ["ngram", "stranger", "eagle"])
def test_drafts_leave_the_distribution_of_samples_as_it_is(checkpoints, name):
    """χ² of the third token over 600 seeds against the model's own probabilities, given the most frequent start."""
    # Whatever is sampled has occurred before, so that there is something to look up.
    prompt = list(range(VOCAB_SIZE - 3))
    requests = [
        request(f"s{seed}", prompt, max_tokens=3, temperature=0.7, top_k=4, seed=seed, logprobs=None)
        for seed in range(600)
    ]
    with checkpoints.engine(checkpoints.spec(name), context_length=300, audit_every_step=False) as engine:
        outputs = engine.generate(requests)
        assert engine.stats().speculation.drafted_total > 0
    start, count = Counter(output.token_ids[:2] for output in outputs).most_common(1)[0]
    assert count > 60
    drawn = Counter(output.token_ids[2] for output in outputs if output.token_ids[:2] == start)
    expected = probabilities(checkpoints.loaded, [*prompt, *start], temperature=0.7, top_k=4)
    assert drawn.keys() <= expected.keys()
    chi2 = sum((drawn[token] - count * p) ** 2 / (count * p) for token, p in expected.items())
    assert chi2 < 16.3  # the 0.1 % quantile of 3 degrees of freedom


def probabilities(loaded: LoadedModel, text: list[int], *, temperature: float, top_k: int) -> dict[int, float]:
    states = dense_states(loaded.model, text)
    logits = loaded.model.logits(states[-1:])[0] / temperature
    best = logits.topk(top_k)
    return dict(zip(best.indices.tolist(), best.values.softmax(dim=0).tolist(), strict=True))


@torch.inference_mode()
def dense_states(model: Decoder, text: list[int]) -> torch.Tensor:
    count = len(text)
    return model.forward(torch.tensor(text), torch.arange(count), DenseAttend(extend_lens=[count]), torch.arange(count))


class Listening:
    """Records what a head proposed for which text."""

    def __init__(self, proposer: ModelProposer) -> None:
        self._proposer = proposer
        self.verified: list[tuple[list[int], tuple[int, ...]]] = []
        self.name, self.writes_kv = proposer.name, proposer.writes_kv
        self.ready, self.release = proposer.ready, proposer.release

    def propose(self, requests: Sequence[DraftRequest]) -> DraftTokens:
        texts = [list(one.token_ids(0, one.seq_len)) for one in requests]
        drafts = self._proposer.propose(requests)
        self.verified += [(text, chain) for text, chain in zip(texts, drafts.chains, strict=True) if chain]
        return drafts


@torch.inference_mode()
def head_guesses(checkpoints: Checkpoints, text: list[int], count: int) -> tuple[int, ...]:
    """What the head says after `text`, computed at once from nothing but the text."""
    model = checkpoints.loaded.model
    config = read_head_config(str(checkpoints.head), model.config)
    head = load_head(str(checkpoints.head), config, dtype=torch.float32, device="cpu", positions=200)
    states = dense_states(model, text)[:-1]
    before = torch.cat((torch.zeros(1, states.shape[1]), states))
    guessed: list[int] = []
    for _ in range(count):
        tokens = torch.tensor([*text, *guessed])
        length = len(tokens)
        hidden = head.forward(
            model.embed(tokens), before, torch.arange(length), DenseAttend(extend_lens=[length]), torch.arange(length)
        )
        guessed.append(int(model.logits(hidden[-1:]).argmax()))
        before = torch.cat((before, hidden[-1:]))
    return tuple(guessed)


@pytest.mark.parametrize(
    "options", [{}, {"page_size": 1, "force_retract_every": 3, "max_retractions": 1000}, {"chunked_prefill_size": 7}]
)
def test_head_reads_the_states_of_its_own_text(checkpoints, options):
    """Whatever a request went through: what the head proposes is what it says to the text alone."""
    with checkpoints.engine(checkpoints.spec("eagle"), **options) as engine:
        listening = Listening(engine.scheduler._shared.speculation.proposer)
        engine.scheduler._shared.speculation.proposer = listening
        shared = [7, 8, 9, 10, 11, 12, 13] * 5
        engine.generate([request("first", shared, max_tokens=12), request("other", range(20, 41), max_tokens=9)])
        engine.generate([request("cached", [*shared, 3, 4], max_tokens=9)], steps_between=1)
    assert len(listening.verified) > 5
    for text, chain in listening.verified:
        assert chain == head_guesses(checkpoints, text, len(chain))


def test_draft_of_another_vocabulary_is_refused(checkpoints, tmp_path):
    other = replace(checkpoints.loaded.model_config, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(CheckpointError, match=f"{VOCAB_SIZE} token ids .* {VOCAB_SIZE + 1}.*same tokenizer"):
        read_draft(checkpoints.spec("itself"), target=other, target_path=str(tmp_path))
