"""`AsyncLLM` on the bundled model."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_engine import AsyncLLM, SamplingParams
from tandem_engine.base.errors import (
    CheckpointError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from tandem_engine.messages.control import PauseMode
from tandem_testing.unhurried import unhurried

MODEL = Path(__file__).resolve().parents[4] / "models" / "tandem-mini"
OPTIONS = {"progress": False, "dtype": "float32", "num_pages": 300, "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
"""For an engine that is `slow`: at full speed it takes two seconds."""


@pytest.fixture(scope="module")
def shared():
    llm = AsyncLLM(MODEL, **OPTIONS)
    yield llm
    asyncio.run(llm.close())


@pytest.fixture
async def llm(shared):
    yield shared
    await drained(shared)


@pytest.fixture
async def slow(llm):
    async with unhurried(llm):
        yield llm


async def drained(llm: AsyncLLM) -> None:
    """No request of a test runs after it, not even when it failed while generation was paused."""
    await llm.resume()
    while (stats := await llm.stats()).running or stats.waiting:
        continue
    assert llm._streams == {}


async def last(generator):
    async for output in generator:
        final = output
    return final


async def test_outputs_grow_and_the_last_is_finished(llm):
    outputs = [output async for output in llm.generate("Once upon a time", GREEDY)]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 12
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in itertools.pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)


async def test_concurrent_requests_equal_single_requests(llm):
    prompts = [[5 + i, 6, 7, 8] for i in range(12)]
    alone = [(await last(llm.generate(prompt, GREEDY))).outputs[0].token_ids for prompt in prompts]
    together = await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in prompts))
    assert [output.outputs[0].token_ids for output in together] == alone


async def test_slow_reader_skips_states_and_loses_no_token(llm):
    [quick] = [(await last(llm.generate("The fox", GREEDY))).outputs[0].token_ids]
    states = []
    async for output in llm.generate("The fox", GREEDY):
        states.append(output)
        while not states[-1].finished and (await llm.stats()).running:
            continue
    assert states[-1].outputs[0].token_ids == quick
    assert len(states) <= 3


async def test_leaving_the_loop_aborts_the_request(slow):
    aborted = (await slow.stats()).aborted_total
    generator = slow.generate("The fox", ENDLESS)
    async for _ in generator:
        break
    await generator.aclose()
    await drained(slow)
    assert (await slow.stats()).aborted_total == aborted + 1


async def test_cancelling_the_reader_aborts_the_request(slow):
    aborted = (await slow.stats()).aborted_total
    started = asyncio.Event()

    async def read() -> None:
        async for _ in slow.generate("The fox", replace(ENDLESS, n=2)):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await drained(slow)
    assert (await slow.stats()).aborted_total == aborted + 2


async def test_abort_by_id_ends_output_with_generated_part(slow):
    outputs = []
    async for output in slow.generate("The fox", ENDLESS, request_id="mine"):
        outputs.append(output)
        await slow.abort("mine")
        await slow.abort("somebody else's")
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 3000


async def test_id_names_one_running_request(slow):
    first = slow.generate("The fox", ENDLESS, request_id="mine")
    await anext(first)
    with pytest.raises(InvalidRequestError, match="'mine' is running already"):
        await anext(slow.generate("A river", GREEDY, request_id="mine"))
    await first.aclose()


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ("", GREEDY, "empty"),
        ([1, 10**9], GREEDY, "token id 1000000000"),
        ("x", SamplingParams(temperature=9.0), "temperature"),
        ("x", SamplingParams(n=0), "n must be between"),
        ([1.5], GREEDY, "a prompt must be"),
    ],
)
async def test_unservable_request_raises_with_the_field(llm, prompt, params, text):
    with pytest.raises(InvalidRequestError, match=text):
        await anext(llm.generate(prompt, params))


async def test_conversation_is_answered(llm):
    output = await last(llm.chat([{"role": "user", "content": "Tell me a story about a fox."}], GREEDY))
    assert output.finished
    assert output.outputs[0].text


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_pause_changes_no_token(llm, mode):
    """The prompt fills pages, so that there is something to forget whatever ran before."""
    prompt = "The fox and the river. " * 8
    expected = (await last(llm.generate(prompt, GREEDY))).outputs[0].token_ids
    generator = llm.generate(prompt, GREEDY)
    await anext(generator)
    await llm.pause(mode)
    assert (await llm.stats()).paused
    if mode is PauseMode.RETRACT:
        assert await llm.reset_prefix_cache() > 0
    await llm.resume()
    assert (await last(generator)).outputs[0].token_ids == expected


async def test_reload_fails_running_requests_as_retryable(slow):
    expected = (await last(slow.generate("The fox", GREEDY))).outputs[0].token_ids
    generator = slow.generate("The fox", ENDLESS)
    await anext(generator)
    await slow.reload_weights()
    with pytest.raises(RequestFailedError) as failed:
        await last(generator)
    assert (failed.value.reason, failed.value.retryable) == ("model_replaced", True)
    assert (await last(slow.generate("The fox", GREEDY))).outputs[0].token_ids == expected
    with pytest.raises(CheckpointError):
        await slow.reload_weights("/nowhere")


async def test_readers_on_other_event_loops_are_served_too(llm):
    here = (await last(llm.generate("The fox", GREEDY))).outputs[0].token_ids

    def elsewhere() -> tuple[int, ...]:
        return asyncio.run(last(llm.generate("The fox", GREEDY))).outputs[0].token_ids

    assert await asyncio.to_thread(elsewhere) == here


async def test_more_requests_than_may_wait_are_refused_at_once():
    few = {"max_queued_requests": 2, "max_running_requests": 1}
    async with AsyncLLM(MODEL, **OPTIONS, **few) as llm, unhurried(llm):
        generators = [llm.generate([5, 6, 7 + i], ENDLESS) for i in range(3)]
        await anext(generators[0])
        waiting = [asyncio.ensure_future(anext(generator)) for generator in generators[1:]]
        while (await llm.stats()).waiting < 2:
            pass
        with pytest.raises(QueueFullError):
            await anext(llm.generate("one more", GREEDY))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_closing_fails_every_reader_and_later_calls():
    llm = AsyncLLM(MODEL, **OPTIONS)
    async with unhurried(llm):
        generator = llm.generate("The fox", ENDLESS)
        await anext(generator)
        await llm.close()
    with pytest.raises(EngineStoppedError):
        await last(generator)
    with pytest.raises(EngineStoppedError):
        await anext(llm.generate("The fox", GREEDY))
    with pytest.raises(EngineStoppedError):
        await llm.stats()
    await llm.close()


async def test_engine_failure_reaches_every_reader():
    llm = AsyncLLM(MODEL, **OPTIONS)

    def fail(engine) -> None:
        raise RuntimeError("broken for the test")

    async with unhurried(llm):
        generator = llm.generate("The fox", ENDLESS)
        await anext(generator)
        llm._thread.ask(fail)
        with pytest.raises(EngineStoppedError, match="broken for the test"):
            await last(generator)
    with pytest.raises(EngineStoppedError):
        await llm.stats()
    await llm.close()


def test_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        AsyncLLM(tmp_path, progress=False)
