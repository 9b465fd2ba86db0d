"""Workloads are a function of their seed, and traces keep their shape."""

import json

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_lab.bench.load import Lengths, fixed_workload, trace_workload

LENGTHS = Lengths(prompt=20, output=10, spread=0.5, shared_prefix=5)


def test_same_seed_gives_the_same_requests() -> None:
    first = fixed_workload(LENGTHS, 8, rate=2.0, seed=3)
    assert first == fixed_workload(LENGTHS, 8, rate=2.0, seed=3)
    assert first != fixed_workload(LENGTHS, 8, rate=2.0, seed=4)


def test_lengths_stay_within_their_spread_and_share_their_prefix() -> None:
    specs = fixed_workload(LENGTHS, 50, rate=None, seed=0)
    words = [spec.prompt.split() for spec in specs]
    assert all(10 <= len(w) <= 20 for w in words)
    assert all(5 <= spec.max_tokens <= 10 for spec in specs)
    assert len({tuple(w[:5]) for w in words}) == 1
    assert len({tuple(w) for w in words}) == 50
    assert {spec.at for spec in specs} == {0.0}


def test_arrivals_at_a_rate_are_in_order_and_about_that_often() -> None:
    times = [spec.at for spec in fixed_workload(LENGTHS, 2000, rate=4.0, seed=1)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.1)


def test_equal_hash_blocks_of_a_trace_become_equal_text(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1024, "output_length": 64, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 640, "hash_ids": [7, 9]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = trace_workload(path, 10, scale=64, speed=2)
    assert (first.at, second.at) == (0.0, 1.0)
    assert (first.max_tokens, second.max_tokens) == (1, 10)
    a, b = first.prompt.split(), second.prompt.split()
    assert len(a) == len(b) == 16
    assert a[:8] == b[:8]
    assert a[8:] != b[8:]


def test_azure_trace_gives_times_and_lengths(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = trace_workload(path, 10, scale=1, speed=1)
    assert second.at == pytest.approx(4.314579, abs=1e-5)
    assert len(first.prompt.split()) == 374
    assert second.max_tokens == 109


@pytest.mark.parametrize("text", ["", "not json", '{"timestamp": 1}', "[1]"])
def test_file_that_is_no_trace_is_a_clear_error(tmp_path, text) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="trace.jsonl"):
        trace_workload(path, 10, scale=1, speed=1)


def test_request_with_several_choices_is_a_clear_error(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1], "n": 2}'
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl: request 1 has n = 2"):
        trace_workload(path, 10, scale=1, speed=1)


def test_missing_trace_is_a_clear_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="absent.jsonl"):
        trace_workload(tmp_path / "absent.jsonl", 10, scale=1, speed=1)
