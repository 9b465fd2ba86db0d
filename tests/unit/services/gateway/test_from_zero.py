"""A fleet that may be scaled to zero: the gateway is ready without workers, and holds what comes."""

import asyncio

import msgspec
import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_services.gateway.models.model import checkpoint_length
from tandem_services.router.decision import Latency, ScoreTerm
from tandem_services.router.starting import StartingWorker
from tandem_testing.gateway_builders import live_gateway
from tandem_testing.metric_text import metric_sum
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS

LATENCY = Latency(
    terms=(ScoreTerm("prefill_compute", 0.1),), itl_s=0.01, kind="hash/cpu/tp1", decode_kind="hash/cpu/tp1"
)


def write_config(folder, **fields):
    (folder / "config.json").write_bytes(msgspec.json.encode(fields))
    return folder


async def test_requests_at_zero_wait_for_the_first_worker(rack, tokenizer, tmp_path):
    folder = write_config(tmp_path, max_position_embeddings=512)
    async with live_gateway(rack.context, tokenizer, [], path=folder, from_zero=True, queue_s=60.0) as gateway:
        assert (await gateway.http.get("/ready")).status_code == 200
        answers = [asyncio.create_task(gateway.complete("hi", max_tokens=3)) for _ in range(2)]

        async def held() -> bool:
            return metric_sum((await gateway.http.get("/metrics")).text, "tandem_gateway_num_requests_held") == 2

        for _ in range(1000):
            if await held():
                break
            await asyncio.sleep(0.01)
        assert await held()
        assert not any(answer.done() for answer in answers)
        engine = rack.add("late", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
        gateway.chooser.fleet.append(engine.view)
        assert [answer.status_code for answer in await asyncio.gather(*answers)] == [200, 200]


async def test_wait_for_a_start_teaches_no_latency(rack, tokenizer, tmp_path):
    """A minute of it would be the margin of the next 512 requests, and strict admission would reject them."""
    folder = write_config(tmp_path, max_position_embeddings=512)
    async with live_gateway(rack.context, tokenizer, [], path=folder, from_zero=True, queue_s=60.0) as gateway:
        gateway.chooser.latency = LATENCY
        answers = [asyncio.create_task(gateway.complete("hi", max_tokens=3)) for _ in range(3)]
        await asyncio.sleep(0.1)
        gateway.chooser.fleet.append(rack.add("late", MockBehavior(token=hash_tokens(3, 250), eos=EOS)).view)
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}

        async def learned_from() -> float:
            return metric_sum((await gateway.http.get("/metrics")).text, "tandem_gateway_ttft_prediction_ratio_count")

        assert await learned_from() == 0
        assert (await gateway.complete("hi", max_tokens=3)).status_code == 200
        assert await learned_from() == 1


async def test_request_above_context_is_rejected_without_worker(rack, tokenizer, tmp_path):
    folder = write_config(tmp_path, max_position_embeddings=16)
    async with live_gateway(rack.context, tokenizer, [], path=folder, from_zero=True) as gateway:
        answer = await gateway.complete([5] * 16, max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_gateway_without_workers_or_scale_to_zero_returns_503(rack, tokenizer):
    async with live_gateway(rack.context, tokenizer, []) as gateway:
        assert (await gateway.http.get("/ready")).status_code == 503
        assert (await gateway.complete("hi")).status_code == 503


async def test_gateway_that_has_served_stays_ready_while_workers_start(rack, tokenizer):
    engine = rack.add("w", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, tokenizer, [engine]) as gateway:
        assert (await gateway.complete("hi", max_tokens=3)).status_code == 200
        gateway.chooser.fleet.clear()
        assert (await gateway.http.get("/ready")).status_code == 503
        gateway.chooser.starts.append(
            StartingWorker(worker_id="x", incarnation="x@1", role="both", model=engine.view.model, phase="weights")
        )
        assert (await gateway.http.get("/ready")).status_code == 200


def test_length_is_that_of_the_text_model(tmp_path):
    assert checkpoint_length(write_config(tmp_path, text_config={"max_position_embeddings": 77})) == 77


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"max_position_embeddings": "x"}', b'{"max_position_embeddings": 0}']
)
def test_checkpoint_without_a_length_is_an_error_that_names_config(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint_length(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint_length(tmp_path / "absent")


def test_checkpoint_without_context_length_error_names_flag(tmp_path):
    with pytest.raises(CheckpointError, match="--from-zero-timeout"):
        checkpoint_length(write_config(tmp_path, hidden_size=8))
