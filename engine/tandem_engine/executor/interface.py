"""The seam between scheduling and computing.

    scheduler thread                         forward thread (CPU) or stream (GPU)
    future = executor.launch(batch)   ─────▶ resolve RESOLVE ids from the FutureMap
    … plans the next step …                  model forward, KV written to out_cache_loc
                                             sample, publish token ids to FutureMap rows
    result = future.result()          ◀───── ForwardResult on the host
    acked = executor.copy(copy)       ─────▶ pages copied, after everything before and before everything after

Batches and copies run strictly in the order of these calls. An exception in a forward is delivered by
`future.result()` and leaves the executor usable.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

from tandem_engine.attention.backend import AttentionBackend
from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult
from tandem_engine.forward.guesses import Guesses
from tandem_engine.memory.page_copy import CopyReport, PageCopy
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.base import StepModel


class Runner(Protocol):
    """Computes steps over one pool."""

    model: StepModel
    """May be replaced by another of the same architecture, while no step is in flight."""
    pool: KvPool

    @property
    def backend(self) -> AttentionBackend: ...

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Run `batch`, and wait for what it comes to."""
        ...

    def guess(self, batches: Sequence[ForwardBatch]) -> Guesses:
        """Run `batches` one behind the other, without a wait for a device. A `RESOLVE` id is what the newest before it
        sampled."""
        ...

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Run the model alone: KV is written, nothing is sampled. float32 [R, vocab] on the host."""
        ...

    def record(self, batch: ForwardBatch, token_ids: Tensor) -> None:
        """Let requests with a history have the tokens [S, K] they got, −1 behind a shorter run
        [every-accepted-token]."""
        ...


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

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        """Queue a copy of pages between the batches, and return at once. See `memory.page_copy`."""
        ...

    def shutdown(self) -> None:
        """Finish what was launched and stop the thread. Idempotent."""
        ...
