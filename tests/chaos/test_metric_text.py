"""The reader that system tests and chaos read metrics with."""

from tandem_testing.metric_text import metric_sum

TEXT = """\
# TYPE tandem_worker_kv_pages gauge
tandem_worker_kv_pages 4096.0
tandem_worker_kv_pages_free{tier="l1"} 4000.0
tandem_gateway_attempts_total{outcome="moved"} 2.0
tandem_gateway_attempts_total{outcome="finished"} 5.0
"""


def test_metric_sum_ignores_metrics_with_longer_names():
    assert metric_sum(TEXT, "tandem_worker_kv_pages") == 4096


def test_all_series_of_a_metric_or_one():
    assert metric_sum(TEXT, "tandem_gateway_attempts_total") == 7
    assert metric_sum(TEXT, 'tandem_gateway_attempts_total{outcome="moved"}') == 2
    assert metric_sum(TEXT, "tandem_absent") == 0


def test_unspecified_labels_match_any_value():
    text = 'x_total{model_name="a",outcome="moved"} 2.0\nx_total{model_name="b",outcome="moved"} 3.0\nx_totals 7.0\n'
    assert metric_sum(text, 'x_total{outcome="moved"}') == 5
    assert metric_sum(text, 'x_total{outcome="moved",model_name="b"}') == 3
    assert metric_sum(text, 'x_total{outcome="lost"}') == 0
