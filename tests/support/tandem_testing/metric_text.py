"""What a process says in Prometheus' text format."""

import re

_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')


def metric_sum(text: str, name: str) -> float:
    """Sum of the series of the metric `name`, of those with the labels that `name` gives if any; 0 without any."""
    wanted, _, given = name.partition("{")
    labels = set(_LABEL.findall(given))
    total = 0.0
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        family, _, found = series.partition("{")
        if family == wanted and labels <= set(_LABEL.findall(found)):
            total += float(value)
    return total
