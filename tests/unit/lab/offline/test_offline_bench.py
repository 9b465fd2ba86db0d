"""The offline benchmark prints figures of work that was really done."""

import json
from pathlib import Path

from tandem_lab.__main__ import main
from tandem_lab.bench.offline import BenchOptions, engine_config
from tandem_lab.bench.transformers_peer import mixed_jobs

MODEL = Path(__file__).resolve().parents[4] / "models" / "tandem-mini"


def test_jobs_are_a_function_of_the_seed_and_within_their_bounds() -> None:
    jobs = mixed_jobs(20, input_len=64, output_len=10, vocab_size=99, seed=3)
    assert jobs == mixed_jobs(20, input_len=64, output_len=10, vocab_size=99, seed=3)
    assert jobs != mixed_jobs(20, input_len=64, output_len=10, vocab_size=99, seed=4)
    assert all(8 <= len(job.prompt) <= 64 and 5 <= job.output_len <= 10 for job in jobs)
    assert all(0 <= token < 99 for job in jobs for token in job.prompt)


def test_run_reports_throughput_latency_cache_and_overlap(capsys) -> None:
    argv = ["bench", "--model", str(MODEL), "--num-prompts", "4", "--input-len", "16", "--output-len", "6"]
    assert main([*argv, "--rounds", "1", "--skip-reference", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tandem"]["offline_output_tokens_per_s"] > 0
    assert report["transformers"] is None
    assert report["offline_ratio"] is None
    assert report["ttft_cached_ms"] > 0
    assert 0 <= report["overlap_hidden_share"] <= 1


def test_model_has_positions_for_the_longest_request() -> None:
    options = BenchOptions(
        model_path="m",
        num_prompts=2,
        input_len=5000,
        output_len=100,
        rounds=1,
        dtype="float32",
        threads=0,
        skip_reference=True,
        as_json=True,
    )
    assert engine_config(options).context_length >= 5100, "without it a model has positions for DEFAULT_CONTEXT tokens"
