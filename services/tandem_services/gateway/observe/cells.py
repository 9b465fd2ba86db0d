"""Metrics of the other cells of a gateway, read at each scrape."""

from collections.abc import Callable, Sequence

from tandem_services.common.metrics import MetricFamilies
from tandem_services.gateway.observe.metrics import MODEL
from tandem_services.router.cells.cell_router import CellFigures


def watch_cells(
    families: MetricFamilies, figures: Callable[[], Sequence[CellFigures]], *, model: str, names: Sequence[str]
) -> None:
    """`names`: of all that `figures` ever returns."""
    labels = [MODEL, "cell"]
    reachable = families.gauge(
        "tandem_gateway_cell_reachable", "1 while the Redis of another cell answers this gateway", labels
    )
    workers = families.gauge(
        "tandem_gateway_cell_workers",
        "Workers of another cell that may take requests, by what they do; workers that do both count twice",
        [*labels, "role"],
    )
    awake = families.gauge(
        "tandem_gateway_cell_awake", "1 while this gateway keeps a view of all workers of another cell", labels
    )

    def read(name: str, value: Callable[[CellFigures], float]) -> Callable[[], float]:
        return lambda: next(value(cell) for cell in figures() if cell.name == name)

    for name in names:
        reachable.labels(model_name=model, cell=name).set_function(read(name, lambda cell: float(cell.reachable)))
        awake.labels(model_name=model, cell=name).set_function(read(name, lambda cell: float(cell.awake)))
        for role, count in (("prefill", lambda c: c.prefill_workers), ("decode", lambda c: c.decode_workers)):
            workers.labels(model_name=model, cell=name, role=role).set_function(read(name, count))
