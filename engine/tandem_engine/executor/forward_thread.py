"""Two executors around the same forward: one on a thread of its own, one in line.

On a CPU the forward thread is what a stream is on a GPU: the scheduler plans the next step while this one
computes, because torch and the compiled kernels let go of the interpreter lock.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult

Forward = Callable[[ForwardBatch], ForwardResult]


class ForwardThread:
    """Implements `ModelExecutor`: overlap mode. `launch` returns at once; batches run in order."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        """Raises `RuntimeError` after `shutdown`."""
        return self._thread.submit(self._run, batch)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)

    def _run(self, batch: ForwardBatch) -> ForwardResult:
        # Grad mode belongs to a thread, so it is set where the forward runs.
        with torch.inference_mode():
            return self._forward(batch)


class InlineExecutor:
    """Implements `ModelExecutor`: normal mode. `launch` returns when the step is computed."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def launch(self, batch: ForwardBatch) -> Future[ForwardResult]:
        future: Future[ForwardResult] = Future()
        try:
            with torch.inference_mode():
                future.set_result(self._forward(batch))
        except Exception as error:  # noqa: BLE001 - the boundary: `result()` raises it, as on a thread
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing runs between launches."""
