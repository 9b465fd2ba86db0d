"""A plan as a dry run: the API server checks every request of it before the first one is sent for good.

    requests of the plan ─▶ each with dryRun=All ─▶ one refused ─▶ `RefusedError`, and nothing has changed
                                                 ─▶ none refused ─▶ the plan is carried out

A spec that one object of the plan cannot be made from therefore changes none of the others. What a dry run does not
count, such as what two new objects take of a quota together, is found while the plan is carried out.
"""

from collections.abc import Awaitable

from tandem_operator.controller.cluster import ApiError
from tandem_operator.planning.observed import Ref

MAX_REFUSALS = 4
"""Refused objects that a message names."""

_CANNOT_REHEARSE = "does not support dry run"
"""What the API server answers where an admission webhook has side effects: such a request is not checked beforehand."""


class RefusedError(ApiError):
    """What the API server answered of each refused object. `status` is that of the first."""

    def __init__(self, refusals: list[tuple[Ref, ApiError]]) -> None:
        first = refusals[0][1]
        shown = "; ".join(f"{ref.kind} {ref.name!r}: {error.message or error}" for ref, error in refusals)
        super().__init__(first.status, first.reason, shown)


class Rehearsal:
    """Await `step` for each request of a plan, then call `end`."""

    def __init__(self) -> None:
        self._refusals: list[tuple[Ref, ApiError]] = []

    async def step(self, ref: Ref, request: Awaitable[object]) -> None:
        """Raises `ApiError` where the answer says nothing of the request itself: another attempt may succeed."""
        try:
            await request
        except ApiError as error:
            if not error.refused:
                raise
            if _CANNOT_REHEARSE not in error.message:
                self._refusals.append((ref, error))
        if len(self._refusals) >= MAX_REFUSALS:
            self.end()

    def end(self) -> None:
        """Raises `RefusedError` if a request was refused."""
        if self._refusals:
            raise RefusedError(self._refusals)
