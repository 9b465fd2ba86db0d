"""The interface between scheduling and computing.

    scheduler thread                         forward thread (CPU) or stream (GPU)
    future = executor.launch(batch)   ─────▶ resolve RESOLVE ids from the FutureMap
    … plans the next step …                  model forward, KV written to out_cache_loc
                                             sample, publish token ids to FutureMap rows
    result = future.result()          ◀───── ForwardResult on the host
    acked = executor.copy(copy)       ─────▶ pages copied, after everything before and before everything after

Batches and copies run strictly in the order of these calls. `future.result()` raises what the forward raised, and the
executor stays usable. `fault_of` classifies such an exception:

    RAISED          a request of the step is at fault, or the code: the requests are retried apart
    OUT_OF_MEMORY   the step was too large: smaller ones may fit, so the requests are retried apart as well
    DEVICE_LOST     the device's context is lost: every later step would fail too
"""

from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch, ForwardResult, Guesses
from tandem_engine.memory.page_copies import CopyReport, PageCopy
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionBackend
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

    def accept(self, accept_lens: Sequence[int]) -> None:
        """Of the newest step, which had drafts, so many tokens [S] of each sampling sequence count: states are to be
        those after them. Called before the next step that has any of the sequences."""
        ...


class HiddenObserver(Protocol):
    """Receives the hidden state of every token. Called by the thread that runs forwards."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose inputs it receives, one after the other in a row, ascending; () is what the final norm returns."""
        ...

    def observe(self, hidden: Tensor, out_cache_loc: Tensor) -> None:
        """Hidden states [T, hidden_size] of a step's tokens, and the slots [T] that their KV went to."""
        ...


class ModelExecutor(Protocol):
    """Runs batches in order. Called by the scheduler thread only."""

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        """Queue `batch` and return at once."""
        ...

    def copy(self, copy: PageCopy) -> Future[CopyReport]:
        """Queue a copy of pages between the batches, and return at once. See `memory.page_copies`."""
        ...

    def shutdown(self) -> None:
        """Finish what was launched and stop the thread. Idempotent."""
        ...


class StepFault(Enum):
    """Kinds of failed steps, by what can be done about them."""

    RAISED = "raised"
    OUT_OF_MEMORY = "out_of_memory"
    DEVICE_LOST = "device_lost"


def fault_of(error: BaseException) -> StepFault:
    """The kind of `error`, which a forward raised."""
    # torch reports a failed allocation on a CPU as a plain RuntimeError.
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return StepFault.OUT_OF_MEMORY
    if isinstance(error, torch.AcceleratorError):
        return StepFault.DEVICE_LOST
    return StepFault.RAISED


class DeviceLostError(Exception):
    """The device cannot compute any more. Not an `EngineError`: only a new process helps."""


class ForcedFaultError(Exception):
    """Raised on purpose, by `LosesResults`."""


class LosesResults:
    """Tests only: loses the result of every n-th step with company in it, once it is computed.

    A sequence that runs alone is spared, so that requests tried apart come to their ends.
    """

    def __init__(self, *, every: int) -> None:
        self._every = every
        self._steps = 0

    def __call__(self, batch: ForwardBatch, result: ForwardResult) -> ForwardResult:
        self._steps += 1
        if self._steps % self._every == 0 and batch.num_sequences > 1:
            raise ForcedFaultError(f"step {batch.step} was made to fail")
        return result
