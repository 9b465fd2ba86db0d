"""The engine as an in-process caller uses it, on the bundled model."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.base.names import RequestId
from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, compat_hash, load
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "models" / "tandem-mini"
SMALL = CacheConfig(num_pages=200)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(EngineConfig(model_path=str(MODEL), dtype="float32", cache=SMALL, threads=1), progress=False)


@pytest.fixture
def engine(loaded):
    with Engine.build(loaded, loaded.config) as engine:
        yield engine
        assert engine.audit().problems == ()


def request(rid: str = "r", prompt: tuple[int, ...] = tuple(range(10, 50)), **sampling) -> GenerateRequest:
    defaults = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    return GenerateRequest(rid=rid, input_ids=prompt, sampling=SamplingParams(**{**defaults, **sampling}))


def test_requests_finish_in_submission_order(engine) -> None:
    prompts = [tuple(range(5, 5 + n)) for n in (3, 40, 17)]
    outputs = engine.generate([request(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    assert [o.rid for o in outputs] == ["r0", "r1", "r2"]
    assert [len(o.token_ids) for o in outputs] == [12, 12, 12]
    assert {o.finish.reason for o in outputs} == {FinishReason.LENGTH}


def test_repeated_prompt_hits_prefix_cache_with_equal_output(engine) -> None:
    first, second = (engine.generate([request(rid)])[0] for rid in ("a", "b"))
    assert second.token_ids == first.token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)


def test_sampled_tokens_depend_on_seed_only(engine) -> None:
    def sample(rid: str, seed: int, beside: int = 0) -> tuple[int, ...]:
        others = [request(f"{rid}-{i}", (7, 8, 9 + i), temperature=1.0, seed=i) for i in range(beside)]
        return engine.generate([request(rid, temperature=1.0, seed=seed), *others])[0].token_ids

    assert sample("a", 5) == sample("b", 5, beside=3)
    assert sample("c", 5) != sample("d", 6)


def test_stop_string_ends_the_output_where_the_text_has_it(engine, loaded) -> None:
    free = engine.generate([request("a", max_tokens=40)])[0]
    text = loaded.text.decode(free.token_ids)
    stop = text[len(text) // 2 :][:3]
    cut = engine.generate([request("b", max_tokens=40, stop=(stop,))])[0]
    assert cut.finish.reason is FinishReason.STOP
    assert cut.finish.matched_stop == stop
    assert free.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert stop in loaded.text.decode(cut.token_ids)
    assert stop not in loaded.text.decode(cut.token_ids[:-1])


def test_min_tokens_holds_back_stop_ids(engine) -> None:
    free = engine.generate([request("a")])[0].token_ids
    stop = free[3]
    early = engine.generate([request("b", stop_token_ids=(stop,))])[0]
    late = engine.generate([request("c", stop_token_ids=(stop,), min_tokens=8)])[0]
    assert early.token_ids[-1] == stop
    assert len(early.token_ids) <= 4
    assert len(late.token_ids) >= 8
    assert stop not in late.token_ids[:7]


def test_logprobs_come_with_every_token_most_likely_first(engine) -> None:
    output = engine.generate([request(logprobs=3)])[0]
    assert len(output.logprobs) == len(output.token_ids)
    for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
        assert logprob.top[0] == (token, logprob.logprob)
        assert [p for _, p in logprob.top] == sorted((p for _, p in logprob.top), reverse=True)
        assert len(logprob.top) == 3


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request(prompt=()), "input_ids"),
        (request(prompt=(10**6,)), "input_ids"),
        (request(prompt=tuple([1] * 5000)), "input_ids"),
        (request(max_tokens=5000), "max_tokens"),
        (request(temperature=-1.0), "temperature"),
    ],
    ids=["empty", "out of vocabulary", "over the context", "too many tokens", "temperature"],
)
def test_unservable_request_is_rejected_before_using_memory(engine, bad, param) -> None:
    output = engine.generate([bad])[0]
    assert output.finish.reason is FinishReason.ERROR
    assert output.finish.code == "invalid_request"
    assert output.finish.retryable is False
    assert output.finish.param == param
    assert engine.audit().private == 0


def test_abort_in_mid_generation_gives_everything_back(engine) -> None:
    engine.add(request("a", max_tokens=100))
    for _ in range(5):
        engine.step()
    engine.abort(RequestId("a"))
    while not engine.scheduler.idle:
        engine.step()
    assert engine.audit().private == 0


def test_bfloat16_and_small_pages_run_too(loaded) -> None:
    config = replace(loaded.config, dtype="bfloat16", cache=CacheConfig(page_size=4, num_pages=200))
    with Engine.build(load(config, progress=False), config) as engine:
        assert len(engine.generate([request()])[0].token_ids) == 12
        assert engine.audit().problems == ()


def test_self_test_measures_and_leaves_no_trace(engine) -> None:
    report = engine.self_test()
    assert report.prefill_tokens_per_s > 0
    assert engine.audit().free == engine.total_pages - 1


def test_self_test_sets_decode_step_time_before_first_decode(loaded) -> None:
    """Without it a router that gave it all sequences of a burst would still have found it free."""
    config = replace(loaded.config, cache=CacheConfig(page_size=16, num_pages=50))
    with Engine.build(loaded, config) as engine:
        assert engine.stats().decode_step_s == 0.0
        report = engine.self_test()
        assert engine.stats().decode_step_s == report.decode_step_s > 0.0


def test_context_over_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--context-length 999999 .* 4096"):
        load(EngineConfig(model_path=str(MODEL), context_length=999_999), progress=False)


def test_folder_without_a_checkpoint_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load(EngineConfig(model_path=str(tmp_path)), progress=False)


def test_two_engines_of_different_shape_have_different_hashes(loaded, engine) -> None:
    config = replace(loaded.config, cache=CacheConfig(page_size=8, num_pages=50), scheduler=SchedulerConfig())
    with Engine.build(loaded, config) as other:
        assert other.compat_hash != engine.compat_hash


def test_how_many_ranks_share_the_heads_is_no_part_of_the_hash(engine) -> None:
    whole = engine.geometry
    shared = msgspec.structs.replace(whole, num_kv_heads=whole.num_kv_heads // 2, tp_size=2)
    assert compat_hash(shared, whole.num_kv_heads) == engine.compat_hash
    assert compat_hash(shared, shared.num_kv_heads) != engine.compat_hash


def test_peer_group_changes_compat_hash(loaded, engine) -> None:
    """Two releases of an image may compute different KV: no request is shared between them."""
    config = replace(loaded.config, cache=CacheConfig(page_size=16, num_pages=50))
    hashes = {engine.compat_hash}
    for group in ("5d8f01aa", "77c0ffee"):
        with Engine.build(loaded, replace(config, disagg=replace(config.disagg, peer_group=group))) as other:
            hashes.add(other.compat_hash)
    assert len(hashes) == 3
