"""What an exception of a step says about the engine.

RAISED          some request of the step is at fault, or the code is: the requests are tried apart
OUT_OF_MEMORY   the step was too large together: smaller ones may fit, so they are tried apart as well
DEVICE_LOST     the device's context is gone; every later step would fail too, whoever is in it
"""

from enum import Enum

import torch

from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult


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
