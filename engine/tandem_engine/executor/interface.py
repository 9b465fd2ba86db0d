"""The seam between scheduling and computing.

    scheduler thread                         forward thread (CPU) or stream (GPU)
    future = executor.launch(batch)   ─────▶ resolve RESOLVE ids from the FutureMap
    … plans the next step …                  model forward, KV written to out_cache_loc
                                             sample, publish token ids to FutureMap rows
    result = future.result()          ◀───── ForwardResult on the host

Batches run strictly in launch order. An exception in a forward is delivered by `future.result()` and
leaves the executor usable.
"""

from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult


class HiddenObserver(Protocol):
    """Who wants to see what the model makes of every token. Called by the thread that runs forwards."""

    def observe(self, hidden: Tensor, out_cache_loc: Tensor) -> None:
        """Hidden states [T, hidden_size] of a step's tokens, and the slots [T] that their KV went to."""
        ...


class ModelExecutor(Protocol):
    """Runs batches in order. Called by the scheduler thread only."""

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        """Queue `batch` and return at once."""
        ...

    def shutdown(self) -> None:
        """Finish what was launched and stop the thread. Idempotent."""
        ...
