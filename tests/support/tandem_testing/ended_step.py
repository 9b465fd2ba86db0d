"""The future of a step that has been computed, or has failed, before the first query."""

from concurrent.futures import Future


def over(error: Exception | None = None) -> Future[None]:
    step: Future[None] = Future()
    if error is None:
        step.set_result(None)
    else:
        step.set_exception(error)
    return step
