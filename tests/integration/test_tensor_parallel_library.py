"""The library with two ranks, which are processes: outputs, orders, faults, and an end that leaves nothing behind."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem_engine import LLM, AsyncLLM, SamplingParams
from tandem_engine.base.errors import CheckpointError, EngineStoppedError, RankLostError
from tandem_engine.library.outputs import RequestOutput
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

PROMPTS = [list(range(5, 25)), list(range(40, 43)), list(range(5, 60))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
OPTIONS = {"dtype": "float32", "progress": False, "threads": 2, "chunked_prefill_size": 64, "max_prefill_tokens": 64}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_tiny_checkpoint("qwen3", folder / name, seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[str, list[tuple[int, ...]]]:
    outputs = {}
    for name, path in checkpoints.items():
        with LLM(path, **OPTIONS) as llm:
            outputs[name] = generate(llm)
    return outputs


def generate(llm: LLM, *, bar: bool = False) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=bar)]


async def rest(outputs: AsyncIterator[RequestOutput]) -> None:
    async for _ in outputs:
        pass


def ranks_of_this_process() -> list[int]:
    """Children that are ranks; the test runner may have others."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = [int(child) for file in children for child in file.read_text().split()]
    return [child for child in found if b"rank" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")]


def test_list_of_prompts_from_sizing_to_the_end(checkpoints, expected, caplog, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with (
        caplog.at_level(logging.INFO, logger="tandem_engine"),
        LLM(checkpoints["one"], tensor_parallel_size=2, mem_fraction_static=0.3, **OPTIONS) as llm,
    ):
        [line] = [text for text in caplog.messages if "weights" in text and "memory" in text]
        assert line.startswith("each of 2 ranks, memory ")
        assert "activations not measured" not in line
        assert len(ranks_of_this_process()) == 1
        assert generate(llm, bar=True) == expected["one"]
        assert "3/3" in capfd.readouterr().err
        trace = llm.start_profile(tmp_path / "traces")
        assert generate(llm) == expected["one"]
        assert llm.stop_profile() == trace
        assert json.loads(trace.read_text())["traceEvents"]
        llm.reload_weights(checkpoints["two"])
        assert generate(llm) == expected["two"]
        with pytest.raises(CheckpointError):
            llm.reload_weights(tmp_path)
        assert llm.reset_prefix_cache() > 0
        assert generate(llm) == expected["two"]
    assert not ranks_of_this_process()
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


async def test_requests_are_served_until_a_rank_is_lost(checkpoints, expected):
    llm = AsyncLLM(checkpoints["one"], tensor_parallel_size=2, **OPTIONS)

    async def last(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
        async for output in llm.generate(prompt, params):
            if output.finished:
                return output.outputs[0].token_ids
        raise AssertionError("the last output is finished")

    assert await asyncio.gather(*(last(prompt, GREEDY) for prompt in PROMPTS)) == expected["one"]
    left = llm.generate(PROMPTS[1], ENDLESS)
    await anext(left)
    await left.aclose()
    await llm.reload_weights(checkpoints["two"])
    assert await last(PROMPTS[0], GREEDY) == expected["two"][0]
    running = llm.generate(PROMPTS[1], ENDLESS)
    await anext(running)
    [rank] = ranks_of_this_process()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineStoppedError, match="rank 1 was ended by signal 9"):
        await asyncio.wait_for(rest(running), 60.0)
    with pytest.raises(EngineStoppedError):
        await last(PROMPTS[0], GREEDY)
    await llm.close()
    assert not ranks_of_this_process()


def test_rank_lost_between_calls_fails_the_next_call(checkpoints):
    with LLM(checkpoints["one"], tensor_parallel_size=2, **OPTIONS) as llm:
        [rank] = ranks_of_this_process()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 was ended by signal 9"):
            generate(llm)
        assert not ranks_of_this_process()
