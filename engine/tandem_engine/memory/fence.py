"""Things that wait for a step to settle before they can be used again.

A request that ends while step N+1 is in flight may still have one token of that step written into its
pages. The next forward runs after it on the same stream and cannot collide, but a writer outside that
stream can: a page received from a peer would be overwritten [page-fence]. So the last holder names the newest
step launched with its memory, and the memory rests here until that step has settled.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class StepFence(Generic[Item]):
    """Items by the step they wait for. Hardly ever more than two steps at a time."""

    def __init__(self) -> None:
        self._last_settled = -1
        self._waiting: dict[int, list[Item]] = {}

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    def __iter__(self) -> Iterator[Item]:
        for items in self._waiting.values():
            yield from items

    def passed(self, step: int) -> bool:
        """Whether `step` has settled: nothing needs to wait for it."""
        return step <= self._last_settled

    def hold(self, step: int, items: Iterable[Item]) -> None:
        """Keep `items` until `step` or a later one settles."""
        assert not self.passed(step), f"step {step} settled already, last settled is {self._last_settled}"
        self._waiting.setdefault(step, []).extend(items)

    def settled(self, step: int) -> list[Item]:
        """Steps settle in order, so `step` stands for all before it. Returns what need not wait any more."""
        self._last_settled = max(self._last_settled, step)
        due = [waiting for waiting in self._waiting if self.passed(waiting)]
        return [item for waiting in due for item in self._waiting.pop(waiting)]
