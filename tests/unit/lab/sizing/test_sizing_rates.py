"""Rates of workers: the roofline, and what was measured."""

import json

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_lab.sizing.model_figures import ModelFigures
from tandem_lab.sizing.rates import DEVICES, MEMORY_SHARE, estimated, measured, read_rates, slower

MODEL = ModelFigures(
    name="m",
    parameters=8_000_000_000,
    active_parameters=8_000_000_000,
    layers=32,
    heads=32,
    kv_bytes=131_072,
    weight_bits=16,
    context_length=8192,
)
FILE = {
    "version": 1,
    "device": "cpu",
    "tensor_parallel_size": 2,
    "pool_tokens": 100_000,
    "token_bytes": 4096.0,
    "transfer_bytes_per_s": 0.0,
    "prefill": [{"tokens": tokens, "seconds": 0.01 + tokens / 5000} for tokens in (64, 256, 1024, 2048, 4096)],
    "decode": [
        {"batch": batch, "context": context, "seconds": 0.01 + 1e-3 * batch + 1e-6 * context}
        for batch in (1, 8, 64)
        for context in (100, 1000, 3000)
    ],
}


def estimate(**changes):
    settings = {"gpus": 1, "context": 1000.0, "mfu": 0.5, "transfer_rate": 1e9} | changes
    return estimated(MODEL, DEVICES["H100"], **settings)


def written(tmp_path, **changes):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(FILE | changes))
    return path


def test_prompt_rate_is_flops_over_twice_the_parameters():
    assert estimate().prefill_rate == pytest.approx(989e12 * 0.5 / 16e9)
    assert estimate(gpus=4).prefill_rate == pytest.approx(4 * estimate().prefill_rate)


def test_pool_is_the_memory_that_weights_leave():
    assert estimate().pool_tokens == int((80e9 * MEMORY_SHARE - 16e9) / 131_072)


def test_small_batch_reads_weights_and_large_batch_reads_kv():
    rates = estimate()
    weights_s = 16e9 / (3.35e12 * 0.8)
    assert rates.step_s(1) == pytest.approx(weights_s + 0.002, rel=0.02)
    assert estimate(context=4000.0).step_s(256) > 2 * rates.step_s(256)


def test_weights_that_do_not_fit_give_no_worker():
    assert estimated(MODEL, DEVICES["L40S"], gpus=1, context=1e6, mfu=0.5, transfer_rate=1e9) is None


def test_measured_rate_is_that_of_further_tokens(tmp_path):
    rates = measured(read_rates(written(tmp_path)), context=2000.0, transfer_rate=7e9)
    assert rates.prefill_rate == pytest.approx(5000.0)
    assert rates.transfer_rate == 7e9
    assert (rates.gpus, rates.pool_tokens, rates.measured) == (2, 100_000, True)


@pytest.mark.parametrize("context", [50.0, 100.0, 550.0, 2000.0, 4000.0])
def test_measured_steps_are_linear_in_the_context(tmp_path, context):
    rates = measured(read_rates(written(tmp_path)), context=context, transfer_rate=1e9)
    assert dict(rates.steps)[8] == pytest.approx(0.018 + 1e-6 * context)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prefill": []}, "prefill"),
        ({"decode": [{"batch": 0, "context": 1, "seconds": 1}]}, "batch"),
        ({"pool_tokens": -1}, "pool_tokens"),
        ({"version": 2}, "version"),
        ({"token_bytes": "many"}, "token_bytes"),
    ],
)
def test_bad_file_is_refused_by_field(tmp_path, changes, named):
    with pytest.raises(ConfigError, match=rf"--rates .*{named}.*tandem ctl"):
        read_rates(written(tmp_path, **changes))


def test_margin_makes_everything_slower_and_nothing_faster():
    rates, wider = estimate(), slower(estimate(), 1.25)
    assert wider.prefill_rate == pytest.approx(rates.prefill_rate / 1.25)
    assert wider.step_s(64) == pytest.approx(rates.step_s(64) * 1.25)
    with pytest.raises(ConfigError, match="--margin"):
        slower(rates, 0.9)
