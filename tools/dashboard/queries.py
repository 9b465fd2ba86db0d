"""The expressions that the panels are made of, in PromQL."""

from grafana import Query

WINDOW = "[$__rate_interval]"
GATEWAYS = 'instance=~"$gateway"'
WORKERS = 'instance=~"$worker"'
PERCENTILES = (0.5, 0.95, 0.99)
BY_WORKER = "{{instance}}"


def gateway(metric: str, matching: str = "") -> str:
    """Series of the chosen gateways."""
    return f"tandem_gateway_{metric}{{{GATEWAYS}{matching and ', ' + matching}}}"


def worker(metric: str, matching: str = "") -> str:
    """Series of the chosen workers."""
    return f"tandem_worker_{metric}{{{WORKERS}{matching and ', ' + matching}}}"


def link(metric: str) -> str:
    """Series of the links of the chosen workers."""
    return f"tandem_link_{metric}{{{WORKERS}}}"


def per_second(series: str, *labels: str) -> str:
    """How fast counters grow, all together or by labels."""
    by = f" by ({', '.join(labels)}) " if labels else ""
    return f"sum{by}(rate({series}{WINDOW}))"


def ratio(part: str, whole: str, *labels: str) -> str:
    """Of two counters; also the mean of something, from the counters of its sum and its number."""
    return f"{per_second(part, *labels)} / {per_second(whole, *labels)}"


def added(series: str, *labels: str) -> str:
    """Gauges, all together or by labels."""
    by = f" by ({', '.join(labels)}) " if labels else ""
    return f"sum{by}({series})"


def percentiles(histogram: str) -> tuple[Query, ...]:
    """Of a histogram of gateways, over all of them."""
    buckets = per_second(gateway(f"{histogram}_bucket"), "le")
    return tuple(Query(f"histogram_quantile({share}, {buckets})", f"p{share * 100:g}") for share in PERCENTILES)


def each(**curves: str) -> tuple[Query, ...]:
    """One query per curve, with its name as legend."""
    return tuple(Query(expr, name.replace("_", " ")) for name, expr in curves.items())
