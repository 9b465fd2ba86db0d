"""Views of several cells share one pool that proves membership."""

from tandem_services.router.cells.proofs import CellProofs, SharedProofs
from tandem_testing.router_builders import make_view


class Pool:
    def __init__(self) -> None:
        self.watched: list[tuple[list[str], frozenset[str]]] = []
        self.again: list[tuple[str, bool]] = []

    def watch(self, workers, *, unlisted):
        self.watched.append((sorted(each.incarnation for each in workers), unlisted))

    def watch_again(self, worker, *, unlisted):
        self.again.append((worker.incarnation, unlisted))


def test_worker_of_one_cell_that_returns_stays_watched_with_others():
    pool = Pool()
    shared = SharedProofs(pool)
    east, west = (CellProofs(shared=shared, pool=pool, cell=cell) for cell in ("east", "west"))
    east.watch([make_view("a")], unlisted=frozenset())
    east.watch_again(make_view("b"), unlisted=True)
    assert pool.again == [("b@1", True)]
    west.watch([make_view("c")], unlisted=frozenset())
    assert pool.watched[-1] == (["a@1", "b@1", "c@1"], frozenset({"b@1"}))
    shared.forget("east")
    assert pool.watched[-1] == (["c@1"], frozenset())


def test_worker_that_returns_often_is_kept_once():
    """Views are not renewed while Redis is away, and workers come and go all the same."""
    pool = Pool()
    cell = CellProofs(shared=SharedProofs(pool), pool=pool, cell="east")
    cell.watch([], unlisted=frozenset())
    for _ in range(3):
        cell.watch_again(make_view("a"), unlisted=False)
    CellProofs(shared=cell.shared, pool=pool, cell="west").watch([], unlisted=frozenset())
    assert pool.watched[-1] == (["a@1"], frozenset())
