"""Work that all ranks do together, and that succeeds on all of them or on none.

Life of one piece of work
    1. begun       at the same place in the order of all joint work on every rank
    2. computed    with the same collectives on every rank
    3. confirmed   by one collective more: whoever returns from it knows that all have come this far
       given up    a rank raised: it leaves the group. That closes the connections on which others wait for it, so
                   they raise too, and leave as well
    4. met again   before the next piece of work all ranks form the group anew

So what raises on one rank raises on every rank, at the same place in their order, and the schedulers deal with it
alike: the requests of a failed step are tried apart as they are on one rank. A rank that does not come to meet the
others again is lost, and the engine with it. Where the backend cannot free those that wait, what raises on one rank is
the end of the engine, and nothing need be confirmed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from tandem_engine.errors import OtherRankFailedError, RankLostError
from tandem_engine.parallel.failure import FirstFailure
from tandem_engine.parallel.group import TpGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class JointWork:
    """One rank's end. Belongs to the thread that `group` belongs to."""

    group: TpGroup
    failure: FirstFailure

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, once it has returned on all ranks.

        Raises:
            OtherRankFailedError: it did not return on another rank.
            RankLostError: a rank is gone, or did not come to form the group again.
            Exception: what `work` raised here.
        """
        if self.group.size == 1:
            return work()
        self._meet()
        try:
            result = work()
            if self.group.can_meet_again:
                self.group.least(torch.zeros(1, dtype=torch.int64))
        except RankLostError as error:
            self._give_up(error)
            raise OtherRankFailedError(f"another rank did not complete this step: {error}") from error
        except Exception as error:
            logger.warning("rank %d abandons a step: %s: %s", self.group.rank, type(error).__name__, error)
            self._give_up(error)
            raise
        return result

    def _meet(self) -> None:
        try:
            self.group.meet_again()
        except RankLostError as error:
            self.failure.record(error)
            raise

    def _give_up(self, error: Exception) -> None:
        if self.group.can_meet_again:
            self.group.leave()
        else:
            # Nobody can free the ranks that wait inside it.
            self.failure.record(error)
