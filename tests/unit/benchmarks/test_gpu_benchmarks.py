"""The arithmetic behind the figures of `benchmarks/gpu`, which needs no device."""

import random
import weakref
from dataclasses import replace

import msgspec
import pytest
import torch

from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.tensor_names import expected_shapes
from tandem_testing.benchmark_modules import benchmarks_importable

with benchmarks_importable():
    from gpu.control.lines import Figure
    from gpu.shapes import SHAPES
    from gpu.spans import busiest, idle_share, launches_of, spans_of
    from gpu.stopwatch import Stopwatch


def span(ts, dur, cat="kernel", **args):
    return {"ts": ts, "dur": dur, "cat": cat, "args": args}


@pytest.mark.parametrize(
    ("events", "idle"),
    [
        ([span(0, 100)], 0.0),
        ([span(0, 40), span(60, 40)], 20 / 50),
        ([span(0, 45), span(20, 20), span(45, 5), span(50, 50)], 0.0),
        ([span(0, 40), span(60, 40), span(40, 20, "cpu_op")], 20 / 50),
        ([span(0, 40), span(60, 40), span(40, 10, "gpu_memcpy")], 10 / 50),
        ([span(0, 10), span(90, 10)], 1.0),
    ],
)
def test_idle_share_is_of_the_middle_half_of_a_trace(events, idle):
    assert idle_share(spans_of(events)) == pytest.approx(idle)


def test_trace_without_a_device_is_refused():
    with pytest.raises(AssertionError, match="no event of a device"):
        idle_share(spans_of([span(0, 10, "cpu_op")]))


def test_gaps_within_a_graph_are_not_host_waits():
    graph = [span(ts, 8, correlation=7) for ts in range(0, 50, 10)]
    alone = [span(60, 40, correlation=8), span(50, 10, "cpu_op", correlation=7)]
    assert sorted(launches_of([*graph, *alone])) == [(0, 48), (60, 100)]
    assert idle_share(launches_of([*graph, *alone])) == pytest.approx(12 / 50)
    assert idle_share(spans_of([*graph, *alone])) == pytest.approx((2 + 2 + 12) / 50)


def test_launches_without_correlation_stay_separate():
    for unknown in ({}, {"correlation": 0}):
        assert launches_of([span(0, 10, **unknown), span(90, 10, **unknown)]) == [(0, 10), (90, 100)]


@pytest.mark.parametrize("name", ["0.6B", "8B", "30B-A3B", "tiny", "tiny MoE"])
def test_parameters_are_those_of_the_models_matrices(tmp_path, name):
    shape = SHAPES[name]
    config = parse_config(open_directory(shape.write(tmp_path)))
    matrices = [size for size in expected_shapes(config).values() if len(size) > 1]
    assert sum(torch.Size(size).numel() for size in matrices) == shape.parameters


def test_decode_bytes_are_weights_plus_kv_of_all_sequences():
    shape = SHAPES["8B"]
    matrices = 2 * (shape.body_parameters + shape.head_parameters)
    assert shape.decode_bytes(32, 1000, 2) == matrices + 32 * 1000 * 128 * 1024


def test_step_reads_experts_that_some_sequence_chooses():
    shape = SHAPES["30B-A3B"]
    one, few, many = (shape.decode_bytes(batch, 0, 2) for batch in (1, 16, 4096))
    assert one == 2 * (shape.body_parameters + shape.head_parameters)
    assert one < few < many
    assert many == pytest.approx(2 * (shape.parameters - shape.head_parameters))


def test_kv_of_one_byte_is_half_of_a_steps_kv():
    shape = SHAPES["8B"]
    bare, half, whole = (
        shape.decode_bytes(8, length, 2, kv_itemsize=size) for length, size in ((0, 2), (64, 1), (64, 2))
    )
    assert 2 * (half - bare) == whole - bare


def test_targets_are_met_from_above_or_from_below():
    figure = Figure(name="", ratio=0.9, of="", target=0.85)
    assert figure.met
    assert not msgspec.structs.replace(figure, ratio=0.8).met
    assert Figure(name="", ratio=0.01, of="", target=0.02, at_most=True).met
    assert Figure(name="", ratio=1.0, of="").met is None


def test_busiest_kernels_come_first():
    events = [span(0, 10) | {"name": "a"}, span(10, 30) | {"name": "b"}, span(40, 25) | {"name": "a"}]
    assert busiest(events, 1) == [("a", 35, 2)]
    assert [name for name, *_ in busiest(events, 5)] == ["a", "b"]


def test_timing_has_a_median_and_the_spread_of_its_middle():
    watch = Stopwatch(torch.device("cpu"))
    times = iter([9.0] * 4 + [1.0, 2.0, 3.0, 4.0, 5.0])
    watch._timed = lambda _: next(times)
    assert watch.timing(lambda: None) == (3.0, 1.0)


def test_memory_is_free_for_measurements_after_an_engine(monkeypatch, tmp_path):
    """It holds most of the device while something refers to it, closed or not."""
    pytest.importorskip("triton")
    with benchmarks_importable():
        from gpu import engine
        from gpu.control.bench import Bench
        from gpu.control.lines import LineFile, Measured
        from gpu.control.record import Record

    pools = []

    class Noted(engine.LLM):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            pools.append(weakref.ref(self._engine._parts.pool))

    monkeypatch.setattr(engine, "LLM", Noted)
    record = Record(part="engine", lines=LineFile(tmp_path), ends_at=float("inf"))
    bench = Bench(record=record, device=torch.device("cpu"), tiny=True, folder=tmp_path)
    loads = replace(engine.TINY, decode=((1, 16),), sampled=(), peers=False)
    engine.EngineRun(bench=bench, shape=SHAPES["tiny"], loads=loads, dice=random.Random(0)).measure()
    assert [pool() for pool in pools] == [None, None]
    names = [line.figure.name for line in record.lines.read() if isinstance(line, Measured)]
    assert names == [
        "decode step at batch 1 × 16 (tiny)",
        "prefill of 64 tokens (tiny)",
        "prompt of 16 tokens by a graph (tiny)",
        "mixed load of 4 requests (tiny)",
        "decode step at batch 2 × 16, KV in fp8 (tiny)",
    ]
