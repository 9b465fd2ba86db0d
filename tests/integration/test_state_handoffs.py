"""Two engines of a model with states, real NIXL between them: the state goes over with the pages, or not at all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import torch

from tandem_engine.base.names import RequestId
from tandem_engine.config import CacheConfig, EngineConfig, HostConfig, SchedulerConfig, WritePolicy
from tandem_engine.disaggregation.stage import HandoffStage
from tandem_engine.disaggregation.transport import DigestOrder
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest, Handoff, HandoffSide, PrefixFetch
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.engine_pairs import MAX_TURNS, Pair
from tandem_lab.verify.engines import Alone, platform_of_device
from tandem_testing.poisoned_states import poisoned_memory, poisoned_states
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

LEASE_S = 120.0
"""A step of one engine keeps the other from renewing."""

PROMPT = [*range(100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    path = write_tiny_checkpoint("qwen3-next", tmp_path_factory.mktemp("model"))
    return load(EngineConfig(model_path=str(path), dtype="float32"), progress=False)


def config_of(model: LoadedModel) -> EngineConfig:
    config = model.config
    return replace(
        config,
        scheduler=SchedulerConfig(
            context_length=400, max_running_requests=4, audit_every_step=True, enable_overlap=False
        ),
        cache=CacheConfig(num_pages=80),
        disagg=replace(
            config.disagg,
            grant_timeout=LEASE_S,
            hold_timeout=LEASE_S,
            drain_timeout=LEASE_S,
            prefix_fetch_timeout=LEASE_S,
        ),
    )


@contextmanager
def pair_of(model: LoadedModel) -> Iterator[Pair]:
    maker = Alone(model=model, platform=platform_of_device)
    with Pair.build(maker, maker, config_of(model)) as pair, poisoned_states(pair.prefill, pair.decode):
        yield pair


@pytest.fixture(scope="module")
def pair(model) -> Iterator[Pair]:
    with pair_of(model) as built:
        yield built


def request(rid: str, tokens: Sequence[int], *, max_tokens: int = 8, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(rid=rid, input_ids=tuple(tokens), sampling=sampling, **fields)


def alone(model: LoadedModel, asked: GenerateRequest) -> Generation:
    with Engine.build(model, replace(config_of(model), cache=CacheConfig(num_pages=80))) as engine:
        return engine.generate([asked])[0]


def stage_of(engine: Engine) -> HandoffStage:
    stage = engine._peers.handoff
    assert stage is not None
    return stage


def receive(pair: Pair, asked: GenerateRequest) -> None:
    """Only the receiving end of a handoff."""
    handoff = Handoff(side=HandoffSide.RECEIVE, room=asked.rid, generation=1, peer=pair.prefill.me)
    pair.generations.expect(asked.rid, resumed=0)
    pair.decode.add(msgspec.structs.replace(asked, handoff=handoff))


def turn_until(done: Callable[[], bool], *engines: Engine) -> None:
    for _ in range(MAX_TURNS):
        if done():
            return
        for engine in engines:
            engine.step()
    raise AssertionError("it does not come to that")


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 129])
def test_prompts_around_a_grain_decode_as_on_one_engine(pair, model, tokens):
    asked = request(f"{tokens} tokens", [7 * n % 200 for n in range(tokens)])
    [found] = pair.generate([asked], 0)
    assert found.token_ids == alone(model, asked).token_ids
    assert found.transfer is not None
    assert found.transfer.bytes > found.transfer.pages * pair.decode.geometry.page_bytes


def test_decode_makes_anchors_after_received_prompt(pair, model):
    asked = request("turn 1", [*PROMPT, 3], max_tokens=60)
    [first] = pair.generate([asked], 0)
    turn = [*asked.input_ids, *first.token_ids, *range(30)]
    pair.generations.expect("turn 2", resumed=0)
    pair.decode.add(request("turn 2", turn))
    turn_until(lambda: pair.decode.scheduler.idle, pair.decode)
    [second] = pair.generations.take_all(["turn 2"])
    assert second.cached_tokens >= len(turn) - 128
    assert second.token_ids == alone(model, request("turn 2", turn)).token_ids


def test_row_waits_for_the_writer_when_its_request_ends(pair):  # [late-write]
    """Whatever the decode worker does, the row is given to no other request before the writer has acknowledged."""
    rows, stage = pair.decode.memory.rows, stage_of(pair.decode)
    before = rows.available
    receive(pair, request("left", PROMPT))
    turn_until(lambda: stage.decode.holds.open_transfers() == 1, pair.decode)
    pair.decode.abort(RequestId("left"))
    for _ in range(20):
        pair.decode.step()
    assert len([*stage.held_rows()]) == 1
    assert rows.available == before - 1
    assert pair.decode.audit().problems == ()
    turn_until(lambda: rows.available == before, pair.prefill, pair.decode)
    assert [*stage.held_rows()] == []
    assert pair.decode.audit().problems == ()


def test_state_that_does_not_verify_is_not_decoded_from(model, monkeypatch):
    asked = request("torn", PROMPT)
    with pair_of(model) as pair:
        transport, states = stage_of(pair.decode).transport, pair.decode._parts.pools.states
        assert states is not None
        digest = transport.digest

        def torn(order: DigestOrder) -> None:
            states.bytes_view()[order.states[0], 0] ^= 1
            digest(order)

        with monkeypatch.context() as patch:
            patch.setattr(stage_of(pair.decode).decode, "transport", Torn(transport, torn))
            [found] = pair.generate([asked], 0)
        assert found.finish is not None
        assert (found.finish.reason, found.finish.retryable) == (FinishReason.ERROR, True)
        assert "1 of 8 pages did not verify" in found.finish.error
        turn_until(lambda: pair.decode.idle and pair.prefill.idle, pair.prefill, pair.decode)
        [again] = pair.generate([msgspec.structs.replace(asked, rid="whole")], 0)
    assert again.token_ids == alone(model, asked).token_ids


class Torn:
    """A transport before whose proofs a bit of the state changes."""

    def __init__(self, transport: object, digest: Callable[[DigestOrder], None]) -> None:
        self._transport = transport
        self.digest = digest

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


def fetched(pair: Pair, rid: str, tokens: Sequence[int]) -> Generation:
    """From the other engine, on the decode engine."""
    fetch = PrefixFetch(peer=pair.prefill.me, tokens=len(tokens), within_s=LEASE_S)
    pair.generations.expect(rid, resumed=0)
    pair.decode.add(request(rid, tokens, fetch=fetch))
    turn_until(lambda: pair.decode.scheduler.idle, pair.decode, pair.prefill)
    assert pair.decode.audit().problems == pair.prefill.audit().problems == ()
    return pair.generations.take_all([rid])[0]


def serve_on_prefill(pair: Pair, rid: str, tokens: Sequence[int]) -> None:
    pair.generations.expect(rid, resumed=0)
    pair.prefill.add(request(rid, tokens))
    turn_until(lambda: pair.prefill.scheduler.idle, pair.prefill)
    pair.generations.take_all([rid])


@pytest.mark.parametrize("tokens", [64, 65, 129, 180])
def test_prefix_is_fetched_with_the_state_at_its_end(pair, model, tokens):
    prompt = [(7 * n + tokens) % 200 for n in range(tokens)]
    serve_on_prefill(pair, f"there {tokens}", prompt)
    before = pair.decode.stats().prefix_fetch.fetched_total
    found = fetched(pair, f"here {tokens}", prompt)
    assert found.token_ids == alone(model, request("alone", prompt)).token_ids
    assert found.cached_tokens == (tokens - 1) // 64 * 64
    assert pair.decode.stats().prefix_fetch.fetched_total == before + (tokens > 64)
    again = fetched(pair, f"again {tokens}", prompt)
    assert (again.token_ids, again.cached_tokens) == (found.token_ids, found.cached_tokens)
    assert pair.decode.stats().prefix_fetch.fetched_total == before + (tokens > 64)


def test_prefix_is_fetched_up_to_the_anchor_that_is_there(pair, model):
    """The other engine knows 150 tokens of the prompt, and can continue after 128."""
    prompt = [(3 * n + 11) % 200 for n in range(250)]
    serve_on_prefill(pair, "part", prompt[:150])
    found = fetched(pair, "whole", prompt)
    assert found.token_ids == alone(model, request("alone", prompt)).token_ids
    assert found.cached_tokens == 128


def test_fetched_state_that_does_not_verify_is_computed(model, monkeypatch):
    prompt = [(5 * n + 2) % 200 for n in range(150)]
    with pair_of(model) as pair:
        serve_on_prefill(pair, "there", prompt)
        fetcher, states = stage_of(pair.decode).prefixes.fetcher, pair.decode._parts.pools.states
        assert states is not None
        digest = fetcher.transport.digest

        def torn(order: DigestOrder) -> None:
            states.bytes_view()[order.states[0], 0] ^= 1
            digest(order)

        with monkeypatch.context() as patch:
            patch.setattr(fetcher, "transport", Torn(fetcher.transport, torn))
            found = fetched(pair, "here", prompt)
        turn_until(lambda: pair.decode.idle and pair.prefill.idle, pair.prefill, pair.decode)
        assert found.token_ids == alone(model, request("alone", prompt)).token_ids
        assert (found.cached_tokens, pair.decode.stats().prefix_fetch.failed_total) == (0, 1)
        assert [*pair.decode.memory.landings] == []
        assert pair.decode.audit().problems == ()


def test_prefix_is_fetched_from_host_memory_with_its_state(model):
    """The other engine has it there alone: pages and state go to its device first."""
    maker = Alone(model=model, platform=platform_of_device)
    prompt, other = [(9 * n) % 200 for n in range(150)], [*range(150)]
    config = config_of(model)
    host = HostConfig(enable_cache=True, write_policy=WritePolicy.WRITE_BACK, size_bytes=4 << 20)
    short = replace(config, cache=CacheConfig(num_pages=16, host=host))
    with Pair.build(maker, maker, short) as pair, poisoned_memory(pair.prefill, pair.decode):
        for rid, tokens in (("there", prompt), ("other", other)):
            serve_on_prefill(pair, rid, tokens)
        found = fetched(pair, "here", prompt)
        assert (found.cached_tokens, pair.decode.stats().prefix_fetch.fetched_total) == (128, 1)
    assert found.token_ids == alone(model, request("alone", prompt)).token_ids
