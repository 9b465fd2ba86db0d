"""However a prompt is scheduled, its embedding is the same, on the fake model whose hidden states read the KV."""

import pytest

from tandem_engine.config import HostConfig, PreemptionMode, WritePolicy
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import Pooling
from tandem_testing.embedding_builders import expected_embedding, make_embedding_request, received_embedding
from tandem_testing.memory_storage import MemoryStorage
from tandem_testing.scheduler_builders import Engine, make_engine, make_message

SHARED = tuple(range(10, 43))


def embeddings() -> list:
    return [
        make_embedding_request("long", range(1, 90), Pooling.MEAN),
        make_embedding_request("shared-mean", [*SHARED, 50], Pooling.MEAN, normalize=False),
        make_embedding_request("shared-last", [*SHARED, 50], Pooling.LAST),
        make_embedding_request("same", [*SHARED, 50], Pooling.MEAN, dimensions=1, normalize=False),
        make_embedding_request("first", [*SHARED, 51], Pooling.CLS),
        make_embedding_request("one-token", [5], Pooling.MEAN),
        make_embedding_request("cut", [*SHARED], Pooling.LAST, dimensions=1),
    ]


def texts() -> list:
    """Ordinary requests between them, with the same prefix, which stay what they are."""
    return [make_message("text-1", [*SHARED, 50], max_tokens=9), make_message("text-2", range(1, 60), max_tokens=30)]


def assert_embedded(engine: Engine) -> None:
    for message in embeddings():
        assert received_embedding(engine, message.rid) == expected_embedding(message), message.rid
        assert engine.finish(message.rid).reason is FinishReason.LENGTH
    for message in texts():
        assert engine.output(message.rid) is not None
    engine.assert_expected(*(message.rid for message in texts()))
    engine.assert_nothing_held()


def run(engine: Engine) -> None:
    for message in [*texts(), *embeddings()]:
        engine.add(message)
        engine.step(2)
    engine.run()


@pytest.mark.parametrize("radix", [False, True], ids=["nocache", "radix"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_chunks_pages_and_prefixes_do_not_show(overlap, chunk, page_size, radix):
    engine = make_engine(
        enable_overlap=overlap,
        enable_mixed_chunk=overlap,
        chunked_prefill_size=chunk,
        page_size=page_size,
        radix=radix,
        usable_pages=1 + 800 // page_size,
    )
    run(engine)
    assert_embedded(engine)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted_embedding_prompt_pools_each_token_once(page_size, overlap):
    engine = make_engine(
        enable_overlap=overlap,
        enable_mixed_chunk=True,
        chunked_prefill_size=2,
        page_size=page_size,
        usable_pages=88 // page_size,
        init_new_token_ratio=0.01,
        min_new_token_ratio=0.01,
        max_retractions=500,
    )
    # While the prompt is computed in pieces, the output outgrows what admission expected of it.
    engine.add(make_message("text", range(1, 10), max_tokens=60))
    engine.step(8)
    long = make_embedding_request("long", range(1, 60), Pooling.MEAN)
    engine.add(long)
    engine.run()
    assert engine.scheduler.tally.retracted > 0
    assert received_embedding(engine, "long") == expected_embedding(long)
    engine.assert_nothing_held()


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_forced_retraction_at_any_moment_does_not_show(page_size, overlap, every):
    engine = make_engine(
        enable_overlap=overlap,
        enable_mixed_chunk=True,
        chunked_prefill_size=5,
        page_size=page_size,
        usable_pages=1 + 800 // page_size,
        force_retract_every=every,
        max_retractions=1000,
    )
    run(engine)
    assert engine.scheduler.tally.retracted > 0
    assert_embedded(engine)


@pytest.mark.parametrize(
    ("policy", "stored"), [*((policy, False) for policy in WritePolicy), (WritePolicy.WRITE_THROUGH, True)]
)
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_embeddings_are_unchanged_by_cache_tiers_and_swaps(page_size, overlap, stored, policy):
    engine = make_engine(
        enable_overlap=overlap,
        enable_mixed_chunk=True,
        chunked_prefill_size=7,
        page_size=page_size,
        usable_pages=112 // page_size,
        host_pages=(160 if stored else 640) // page_size,
        host=HostConfig(enable_cache=True, write_policy=policy, swap_bytes=16 * 64),
        storage=MemoryStorage() if stored else None,
        preemption_mode=PreemptionMode.SWAP,
        force_retract_every=4,
        init_new_token_ratio=0.1,
        max_retractions=1000,
    )
    for turn in range(3):
        run(engine)
        assert_embedded(engine)
        if turn < 2:
            engine.received.clear()
            push_out(engine, turn)
    tally = engine.scheduler.tally
    assert tally.swapped_out > 0
    assert (tally.disk_cached_tokens if stored else tally.host_cached_tokens) > 0


def push_out(engine: Engine, turn: int) -> None:
    """What others need the device for sends cached prefixes to lower tiers."""
    message = make_message(f"other-{turn}", [60 + turn] * 90, max_tokens=3)
    engine.add(message)
    engine.run()
    engine.assert_expected(message.rid)


def test_last_may_use_a_cached_prefix_and_mean_may_not():
    engine = make_engine(page_size=4)
    for rid, pooling in (("warm", Pooling.LAST), ("last", Pooling.LAST), ("mean", Pooling.MEAN)):
        engine.add(make_embedding_request(rid, SHARED, pooling))
        engine.run()
    cached = {rid: engine.received[rid].outputs[0].cached_tokens for rid in ("warm", "last", "mean")}
    assert cached == {"warm": 0, "last": 32, "mean": 0}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_aborted_embedding_frees_all_its_pages(steps):
    engine = make_engine(chunked_prefill_size=8, enable_overlap=True)
    engine.add(make_embedding_request("gone", range(1, 60), Pooling.MEAN))
    engine.step(steps)
    engine.scheduler.abort("gone")
    engine.run()
    assert engine.finish("gone").reason is FinishReason.ABORT
    assert engine.received["gone"].outputs[-1].embedding is None
    engine.assert_nothing_held()


def test_embedding_that_misses_its_deadline_ends():
    engine = make_engine(chunked_prefill_size=8)
    message = make_embedding_request("late", range(1, 60), Pooling.MEAN)
    engine.add(type(message)(**{**{f: getattr(message, f) for f in message.__struct_fields__}, "deadline_s": 5.0}))
    engine.step(2)
    engine.clock.time = 6.0
    engine.run()
    assert engine.finish("late").code == "deadline_exceeded"
    engine.assert_nothing_held()
