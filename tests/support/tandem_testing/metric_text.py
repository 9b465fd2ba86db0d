"""What a process says in Prometheus' text format."""


def metric_sum(text: str, name: str) -> float:
    """Sum of the series of the metric `name`, or of the one series that `name` gives with its labels; 0 without any."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(name) and line[len(name)] in " {"
    )
