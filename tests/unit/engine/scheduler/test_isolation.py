"""An exception in one request ends that request only [step-error-isolated]."""

from collections.abc import Callable
from math import log2

import pytest
import torch

from tandem_engine.executor.interface import DeviceLostError, StepFault, fault_of
from tandem_engine.forward.batch import ForwardBatch, ForwardResult
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.outputs import FinishReason
from tandem_testing.fake_executor import FakeModel
from tandem_testing.fake_executors import EagerExecutor, LateExecutor
from tandem_testing.scheduler_builders import Engine, FakeWindow, expected_output, make_engine, make_message

POISON = 96
"""A forward that meets this token raises."""


class Poisoned:
    """Raises for every step whose new tokens include `token`, known or resolved."""

    def __init__(self, token: int = POISON) -> None:
        self.token = token
        self.raised = 0

    def __call__(self, batch: ForwardBatch) -> None:
        if self.token in batch.input_ids.tolist():
            self.raised += 1
            raise ValueError("poisoned")


def engine_with(faults: Callable[[ForwardBatch], None], *, overlap: bool, **settings: object) -> Engine:
    executor = LateExecutor if overlap else EagerExecutor
    return make_engine(enable_overlap=overlap, executor=lambda model: executor(model, faults), **settings)


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def overlap(request):
    return request.param


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_poisoned_prompt_ends_alone(overlap, mixed, page_size):
    engine = engine_with(Poisoned(), overlap=overlap, enable_mixed_chunk=mixed, page_size=page_size)
    for i in range(4):
        engine.add(make_message(f"good-{i}", [1 + i, 2, 3, 4, 5, 6], max_tokens=9, temperature=1.0, seed=i))
    engine.step(2)
    engine.add(make_message("bad", [1, 2, POISON], max_tokens=9))
    engine.add(make_message("late", [7, 8], max_tokens=9))
    engine.run()
    finish = engine.finish("bad")
    assert (finish.reason, finish.code, finish.retryable) == (FinishReason.ERROR, "engine_error", False)
    assert "bad" in finish.error
    assert "ValueError" in finish.error
    engine.assert_expected("late", *(f"good-{i}" for i in range(4)))
    engine.assert_nothing_held()
    assert engine.scheduler.stats().poison_requests_total == 1


def test_several_poison_requests_fail_alone_in_bounded_steps(overlap):
    faults = Poisoned()
    engine = engine_with(faults, overlap=overlap, max_running_requests=16)
    bad = {3, 4, 11}
    for i in range(16):
        prompt = [1 + i, POISON if i in bad else 2, 3]
        engine.add(make_message(f"r{i}", prompt, max_tokens=6))
    engine.run()
    assert {i for i in range(16) if engine.finish(f"r{i}").code == "engine_error"} == bad
    engine.assert_expected(*(f"r{i}" for i in range(16) if i not in bad))
    engine.assert_nothing_held()
    # In overlap mode a step on top of a failed one may raise too before it is known to be void.
    assert faults.raised <= len(bad) * (log2(16) + 2) * (1 + overlap)


def test_poison_request_in_decode_keeps_streamed_tokens(overlap):
    """The poison comes at a position, so tokens before it were good."""

    def faults(batch: ForwardBatch) -> None:
        lens = zip(batch.seq_lens.tolist(), batch.page_table[:, 0].tolist(), strict=True)
        if any(seq_len == 12 and page == bad_page[0] for seq_len, page in lens):
            raise ValueError("poisoned")

    bad_page = [-1]
    engine = engine_with(faults, overlap=overlap, page_size=4, radix=False)
    engine.add(make_message("good", [5, 6, 7], max_tokens=20))
    engine.add(make_message("bad", [1, 2, 3], max_tokens=20))
    engine.step()
    bad_page[0] = engine.scheduler.queues.requests["bad"].held_kv.pages[0]
    engine.run()
    assert engine.finish("bad").code == "engine_error"
    assert 8 <= len(engine.output("bad")) <= 9
    engine.assert_expected("good")
    engine.assert_nothing_held()


def test_transient_step_error_fails_no_request(overlap):  # one suspect may be chance
    broken = {2, 5, 6}

    def faults(batch: ForwardBatch) -> None:
        if batch.step in broken:
            raise RuntimeError("once")

    engine = engine_with(faults, overlap=overlap, chunked_prefill_size=4, enable_mixed_chunk=True)
    for i in range(3):
        engine.add(make_message(f"r{i}", range(1 + i, 12), max_tokens=9, stop=("zz",)))
    engine.run()
    engine.assert_expected()
    assert engine.scheduler.stats().engine_errors_total >= 2
    engine.assert_nothing_held()


def test_single_request_is_tried_twice_and_no_more(overlap):
    faults = Poisoned()
    engine = engine_with(faults, overlap=overlap)
    engine.add(make_message("bad", [1, POISON], max_tokens=9))
    engine.run()
    assert engine.finish("bad").code == "engine_error"
    assert faults.raised == 2


def test_failed_request_leaves_nothing_in_prefix_cache(overlap):
    engine = engine_with(Poisoned(), overlap=overlap, page_size=2)
    engine.add(make_message("bad", [1, 2, 3, 4, POISON], max_tokens=9))
    engine.run()
    assert engine.scheduler.audit().tree == 0


def test_suspects_obey_aborts(overlap):
    engine = engine_with(Poisoned(), overlap=overlap)
    for rid in ("a", "b", "c"):
        engine.add(make_message(rid, [1, 2, POISON] if rid == "c" else [1, 2, 3], max_tokens=9))
    while not engine.scheduler._parts.isolation.active:
        engine.step()
    for rid in ("a", "b", "c"):
        engine.scheduler.abort(rid)
    engine.run()
    assert {engine.finish(rid).reason for rid in ("a", "b", "c")} == {FinishReason.ABORT}
    engine.assert_nothing_held()


def test_long_prompts_are_tried_in_chunks_and_come_through(overlap):
    engine = engine_with(
        Poisoned(), overlap=overlap, chunked_prefill_size=5, max_prefill_tokens=8, enable_mixed_chunk=True
    )
    engine.add(make_message("long", range(1, 40), max_tokens=5))
    engine.add(make_message("bad", [*range(1, 30), POISON, 2, 3], max_tokens=5))
    engine.add(make_message("short", [4, 5], max_tokens=5))
    engine.run()
    assert engine.finish("bad").code == "engine_error"
    engine.assert_expected("long", "short")
    engine.assert_nothing_held()


def test_isolated_requests_without_pages_are_requeued(overlap):
    def faults(batch: ForwardBatch) -> None:
        if batch.step == 3:
            raise RuntimeError("once")

    engine = engine_with(
        faults, overlap=overlap, page_size=1, usable_pages=40, chunked_prefill_size=8, init_new_token_ratio=0.1
    )
    for i in range(3):
        engine.add(make_message(f"r{i}", range(1 + i, 14), max_tokens=24))
    engine.run()
    engine.assert_expected()
    engine.assert_nothing_held()


class CorruptingExecutor(EagerExecutor):
    """The model computes NaN for every sequence whose history ends in the poison."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        forward = model.forward

        def corrupted(batch: ForwardBatch) -> ForwardResult:
            result = forward(batch)
            ends = batch.extend_lens.cumsum(0)[batch.sample_index] - 1
            rows = (batch.input_ids[ends] == POISON).nonzero().squeeze(1).tolist()
            return ForwardResult(
                step=result.step, next_token_ids=result.next_token_ids, logprobs=result.logprobs, corrupted=tuple(rows)
            )

        model.forward = corrupted


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_nan_logits_end_their_request_and_leave_the_others(enable_overlap):
    engine = make_engine(enable_overlap=enable_overlap, executor=CorruptingExecutor, page_size=2)
    engine.add(make_message("good", [1, 2, 3], max_tokens=9, logprobs=1))
    engine.add(make_message("bad", [1, 2, 3, POISON], max_tokens=9))
    engine.add(make_message("other", [4, 2, 3], max_tokens=9))
    engine.run()
    finish = engine.finish("bad")
    assert (finish.code, finish.retryable) == ("engine_error", False)
    assert "NaN" in finish.error
    assert engine.output("bad") == []
    engine.assert_expected("good", "other")
    engine.assert_nothing_held()
    assert engine.scheduler.stats().corrupted_requests_total == 1
    assert engine.memory.cached_len((1, 2, 3, POISON), space=BASE_SPACE, max_match=4) <= 2, "a prefix of `good` at most"


def test_memory_that_a_request_alone_lacks_may_be_had_elsewhere():
    def faults(batch: ForwardBatch) -> None:
        raise MemoryError

    engine = engine_with(faults, overlap=False)
    engine.add(make_message("r"))
    engine.run()
    assert (engine.finish().code, engine.finish().retryable) == ("out_of_memory", True)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("x"), StepFault.RAISED),
        (MemoryError(), StepFault.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), StepFault.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), StepFault.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), StepFault.DEVICE_LOST),
    ],
)
def test_error_message_names_exception_type(error, fault):
    assert fault_of(error) is fault


def test_device_loss_raises_without_failing_a_request():
    def faults(batch: ForwardBatch) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine = engine_with(faults, overlap=False)
    engine.add(make_message("r"))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        engine.step()
    assert engine.finish() is None


def test_tokens_before_a_failed_step_are_streamed():
    failing = []

    def faults(batch: ForwardBatch) -> None:
        if batch.step >= 4:
            failing.append(batch.step)
            raise RuntimeError("for ever")

    engine = engine_with(faults, overlap=False)
    engine.add(make_message(max_tokens=9))
    engine.run()
    assert len(engine.output()) == 3
    assert failing == [4, 5]


def test_stages_do_not_get_the_seats_and_pages_of_suspects(overlap):
    engine = engine_with(Poisoned(), overlap=overlap, max_running_requests=4, max_tokens_per_step=64)
    for i in range(3):
        engine.add(make_message(f"r{i}", [1 + i, POISON, 3], max_tokens=20))
    while not engine.scheduler._parts.isolation.active:
        engine.step()
    assert engine.scheduler.for_stages.spare_requests() == 1
    # Three pages with three prompts, and what is expected of their outputs.
    assert engine.scheduler.for_stages.spare_pages() < 61 - 3
    engine.run()
    engine.assert_nothing_held()


def test_suspect_waits_for_its_step_to_free_a_window() -> None:
    """Two chunks in flight need more pages of a window than there are: it was put back with the first in flight."""

    def faults(batch: ForwardBatch) -> None:
        if batch.step == 1:
            raise RuntimeError("by chance")

    sizes = {"usable_pages": 60, "page_size": 4, "chunked_prefill_size": 8, "max_prefill_tokens": 16}
    engine = engine_with(faults, overlap=True, windows=[FakeWindow(tokens=5, num_pages=7)], **sizes)
    engine.add(make_message("short", range(1, 8), max_tokens=4))
    engine.add(make_message("long", range(20, 60), max_tokens=4))
    engine.run()
    for rid in ("short", "long"):
        assert engine.output(rid) == expected_output(engine.messages[rid])
