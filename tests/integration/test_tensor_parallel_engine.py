"""An engine of two ranks does what an engine of one does. The ranks are threads, with gloo between them."""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.config import (
    CacheConfig,
    EngineConfig,
    HostConfig,
    PreemptionMode,
    SchedulePolicy,
    SchedulerConfig,
    WritePolicy,
)
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.reload import Reloaded
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest, Pooling, PoolingParams, SessionRef
from tandem_engine.model.base import CausalLM
from tandem_lab.verify.engines import ThreadRanks
from tandem_testing.scheduler_builders import make_message
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

PROMPTS = [range(5, 25), range(40, 43), range(5, 60), range(70, 90)]
POISON = 250
"""A token that a faulty rank's model cannot stand."""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    checkpoint = write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    return EngineConfig(
        model_path=str(checkpoint),
        dtype="float32",
        threads=2,
        cache=CacheConfig(num_pages=64),
        scheduler=SchedulerConfig(max_running_requests=8, chunked_prefill_size=32),
    )


@pytest.fixture(scope="module")
def alone(config) -> LoadedModel:
    return load(config, progress=False)


@pytest.fixture(scope="module")
def ranks(config) -> ThreadRanks:
    return ThreadRanks.load(config, 2)


def generate(engine: Engine, prompts=PROMPTS, **params) -> list[tuple[int, ...]]:
    messages = [make_message(f"r{i}", prompt, **params) for i, prompt in enumerate(prompts)]
    return [generation.token_ids for generation in engine.generate(messages, steps_between=2)]


@dataclass(frozen=True, slots=True)
class Sensitive:
    """A model that raises at `POISON`: before its first collective, or after its last."""

    model: CausalLM
    late: bool

    @property
    def config(self):
        return self.model.config

    @property
    def attention(self):
        return self.model.attention

    def forward(self, input_ids, positions, attend, wanted):
        poisoned = bool((input_ids == POISON).any())
        if poisoned and not self.late:
            raise ValueError("a token that this rank cannot stand")
        hidden = self.model.forward(input_ids, positions, attend, wanted)
        return hidden * torch.nan if poisoned else hidden

    def logits(self, hidden):
        logits = self.model.logits(hidden)
        if bool(hidden.isnan().any()):
            raise ValueError("a token that this rank cannot stand")
        return logits


def with_fault(ranks: ThreadRanks, *failing: int, late: bool) -> ThreadRanks:
    parts = [
        replace(part, model=Sensitive(part.model, late)) if rank in failing else part
        for rank, part in enumerate(ranks.parts)
    ]
    return ThreadRanks(parts=parts)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
def test_poison_request_fails_alone_with_two_ranks(config, alone, ranks, failing, late, overlap):
    config = replace(config, scheduler=replace(config.scheduler, enable_overlap=overlap))
    with Engine.build(alone, replace(alone.config, scheduler=config.scheduler)) as engine:
        expected = generate(engine)
    messages = [make_message(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    messages.insert(2, make_message("poison", [3, POISON, 4]))
    with with_fault(ranks, *failing, late=late).engine(config) as engine:
        generations = engine.generate(messages, steps_between=2)
        poison = generations.pop(2)
        assert [generation.token_ids for generation in generations] == expected
        assert (poison.finish.reason, poison.finish.retryable) == (FinishReason.ERROR, False)
        assert poison.token_ids == ()
        assert engine.scheduler.stats().poison_requests_total == 1
        assert generate(engine) == expected
        assert engine.audit().problems == ()


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_every_policy_gives_equal_order_on_all_ranks(config, alone, ranks, policy):
    # Two run at a time, so that there is something to order.
    scheduler = replace(config.scheduler, schedule_policy=policy, max_running_requests=2, policy_ageing_seconds=0.01)
    shared = [*PROMPTS, *([*prompt, 7] for prompt in PROMPTS)]
    messages = [make_message(f"r{i}", prompt, priority=20 * (i % 3)) for i, prompt in enumerate(shared)]
    with Engine.build(alone, replace(alone.config, scheduler=scheduler)) as engine:
        expected = [generation.token_ids for generation in engine.generate(messages)]
    with ranks.engine(replace(config, scheduler=scheduler)) as engine:
        assert [generation.token_ids for generation in engine.generate(messages, steps_between=1)] == expected
        assert engine.audit().problems == ()


def test_session_continues_with_two_ranks(config, alone, ranks):
    def turns(engine: Engine) -> list[tuple[int, ...]]:
        outputs = []
        for turn, new in enumerate(PROMPTS):
            message = make_message(f"t{turn}", new, session=SessionRef(id="s", turn=turn))
            [generation] = engine.generate([message])
            outputs.append((generation.finish.reason, *generation.token_ids))
        assert engine.generate([make_message("late", PROMPTS[0], session=SessionRef(id="s", turn=9))])[0].finish.param
        engine.close_session("s")
        return outputs

    with Engine.build(alone, alone.config) as engine:
        expected = turns(engine)
    with ranks.engine(config) as engine:
        assert turns(engine) == expected
        assert generate(engine)
        assert engine.audit().problems == ()


def test_embeddings_are_those_of_the_whole_model(config, alone, ranks):
    messages = [embed(f"{kind}{i}", prompt, kind) for kind in Pooling for i, prompt in enumerate(PROMPTS)]
    with Engine.build(alone, alone.config) as engine:
        expected = [generation.embedding for generation in engine.generate(messages)]
    with ranks.engine(config) as engine:
        got = [generation.embedding for generation in engine.generate(messages, steps_between=1)]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(vector(one), vector(other), atol=1e-5, rtol=1e-4)


def embed(rid: str, prompt: Sequence[int], kind: Pooling) -> GenerateRequest:
    return msgspec.structs.replace(make_message(rid, prompt, max_tokens=1), pooling=PoolingParams(pooling=kind))


def vector(embedding: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(embedding), dtype=torch.float32)


HOST = HostConfig(enable_cache=True, size_bytes=1 << 24, swap_bytes=1 << 24)


@pytest.mark.parametrize(
    ("write_policy", "mode", "overlap"),
    [
        (WritePolicy.WRITE_THROUGH, PreemptionMode.SWAP, True),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, PreemptionMode.AUTO, True),
        (WritePolicy.WRITE_BACK, PreemptionMode.SWAP, False),
        (WritePolicy.WRITE_BACK, PreemptionMode.AUTO, True),
    ],
)
def test_kv_is_offloaded_and_restored_on_all_ranks(config, alone, ranks, mode, write_policy, overlap):
    with Engine.build(alone, alone.config) as engine:
        expected = generate(engine, max_tokens=16)
    scheduler = replace(
        config.scheduler,
        force_retract_every=3,
        max_retractions=10_000,
        preemption_mode=mode,
        enable_overlap=overlap,
    )
    cache = replace(config.cache, num_pages=8, host=replace(HOST, write_policy=write_policy))
    with ranks.engine(replace(config, scheduler=scheduler, cache=cache)) as engine:
        for _ in range(2):
            assert generate(engine, max_tokens=16) == expected
        stats = engine.scheduler.stats()
        assert stats.retracted_total > 0
        assert stats.host_cached_tokens_total > 0
        assert (stats.swapped_out_total > 0) or mode is PreemptionMode.AUTO
        assert engine.audit().problems == ()


def test_all_ranks_serve_new_weights_from_the_same_step_on(config, alone, ranks, tmp_path):
    other = write_tiny_checkpoint("qwen3", tmp_path / "other", seed=1)
    with Engine.build(alone, alone.config) as engine:
        before = generate(engine)
        await_reload(engine, engine.reload(str(other)))
        after = generate(engine)
    assert before != after
    with ranks.engine(config) as engine:
        engine.add(make_message("cut short", PROMPTS[0], max_tokens=400))
        engine.step()
        identity = engine.compat_hash
        reloaded = await_reload(engine, engine.reload(str(other)))
        assert (reloaded.path, reloaded.ended) == (str(other), 1)
        assert engine.compat_hash != identity
        assert generate(engine) == after
        with pytest.raises(CheckpointError):
            await_reload(engine, engine.reload(str(tmp_path)))
        assert generate(engine) == after
        assert engine.audit().problems == ()


def test_invalid_new_weights_change_nothing(config, alone, ranks, tmp_path):
    with Engine.build(alone, alone.config) as engine:
        expected = generate(engine)
    silent = write_tiny_checkpoint("qwen3", tmp_path / "silent")
    for shard in silent.glob("*.safetensors"):
        tensors = load_file(shard)
        tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
        save_file(tensors, shard)
    with ranks.engine(config) as engine:
        with pytest.raises(CheckpointError, match="same logit"):
            await_reload(engine, engine.reload(str(silent)))
        assert generate(engine) == expected


def await_reload(engine: Engine, reloading: "Future[Reloaded]") -> Reloaded:
    while not reloading.done():
        if not engine.step():
            wait([reloading], timeout=0.01)
    return reloading.result()
