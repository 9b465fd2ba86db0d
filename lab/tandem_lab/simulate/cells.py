"""Several cells in one Redis, each under the tag of its cluster: a fleet of its own, and gateways that prefer it.

Gateway n belongs to cell n modulo their number. Its router is that of the product with other cells; views are renewed
and summaries read in simulated time.
"""

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from random import Random

from tandem_engine.base.errors import ConfigError
from tandem_lab.simulate.clock import PATIENCE_S, SimulatedRedis
from tandem_lab.simulate.fleet import MODEL, Fleet, FleetShape
from tandem_lab.simulate.worker import ModelledWorker
from tandem_services.router.cells.cell_router import CellRouter
from tandem_services.router.cells.neighbour_cell import NeighbourCell
from tandem_services.router.cells.places import CellPlace
from tandem_services.router.router import Router, RouterConfig

WORKER_WAIT_S = 1.0
"""As a gateway's."""


def checked_cells(cells: int, *, gateways: int, workers: Mapping[str, int], scaled: bool) -> int:
    """`cells`, among which `workers`, by role, and `gateways` can be divided. Raises `ConfigError` else."""
    if cells == 1:
        return 1
    if scaled:
        raise ConfigError("--cells: scalers are compared in one cell; leave out --autoscale")
    if gateways < cells:
        raise ConfigError(f"--cells {cells}: each cell needs a gateway; add --gateways {cells} or more")
    for role, count in workers.items():
        if count % cells:
            raise ConfigError(f"--cells {cells}: --workers has {count} ({role}), which is no multiple of {cells}")
    return cells


class CellFleets:
    """All cells of a run, used as one `Fleet` is."""

    def __init__(self, shape: FleetShape, redis: Sequence[SimulatedRedis]) -> None:
        """There is a multiple of as many workers of each role."""
        count = len(redis)
        part = replace(shape, both=shape.both // count, prefill=shape.prefill // count, decode=shape.decode // count)
        others = shape.size - part.size
        self.cells = [Fleet(part, place, cell=f"c{number:02}-", others=others) for number, place in enumerate(redis)]
        self.redis = redis[0]
        """Its time is that of all."""
        self.workers: MutableMapping[str, ModelledWorker] = ChainMap(*(cell.workers for cell in self.cells))
        self.all_workers: list[ModelledWorker] = []

    async def begin(self) -> None:
        """See `Fleet.begin`."""
        for cell in self.cells:
            await cell.begin()
            self.all_workers += cell.all_workers

    def of_gateway(self, number: int) -> Fleet:
        """See `Fleet.of_gateway`."""
        return self.cells[number % len(self.cells)]

    @property
    def closing(self) -> bool:
        """See `Fleet.closing`."""
        return self.cells[0].closing

    @closing.setter
    def closing(self, value: bool) -> None:
        for cell in self.cells:
            cell.closing = value


class SimulatedCellRouter(CellRouter):
    """Renewed by events instead of tasks."""

    async def refresh(self) -> None:
        """Called each simulated second. Raises `RedisUnavailableError`."""
        for router in tuple(self.in_use()):
            await router.refresh()
        await self.look()

    async def _look_again(self, cells: Sequence[NeighbourCell]) -> None:
        """In no time: a task would end at another moment in each run."""
        for cell in cells:
            await cell.look(MODEL)


def cell_router(
    config: RouterConfig, redis: Sequence[SimulatedRedis], number: int, *, seed: int
) -> SimulatedCellRouter:
    """That of gateway `number`."""
    own = number % len(redis)
    others = [CellPlace(name=each.cluster, url=each.address.url) for cell, each in enumerate(redis) if cell != own]
    return SimulatedCellRouter(
        replace(config, cluster=redis[own].cluster),
        others,
        model=MODEL,
        worker_wait_s=WORKER_WAIT_S,
        clock=redis[own].events,
        random=Random(seed + number),
        source=redis[own].source,
        begin=Router.refresh,
        open_wait_s=PATIENCE_S,
    )
