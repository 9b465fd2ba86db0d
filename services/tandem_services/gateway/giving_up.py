"""Why a choice has no further attempt, as the client is told, and which worker a failed attempt speaks against."""

from tandem_engine.errors import DrainingError, PausedError, TransferError
from tandem_services.common.errors import ApiError, internal_error, unavailable
from tandem_services.gateway.attempt import AttemptFailedError, FailureCause
from tandem_services.gateway.progress import LOST
from tandem_services.gateway.session_turns import session_lost
from tandem_services.router.choice import Choice, NoWorkersError


def at_fault(choice: Choice, failure: AttemptFailedError) -> str:
    """The worker to avoid next time. A receiver that reports a failed transfer is well: its sender is not."""
    if failure.code == TransferError.code and choice.prefill is not None:
        return choice.prefill.incarnation
    return failure.incarnation


def nobody(error: NoWorkersError) -> ApiError:
    """No worker came in time."""
    return unavailable("No worker can take the request now. Try again later.", retry_after=error.retry_after)


def gave_up(failure: AttemptFailedError) -> ApiError:
    """`failure` was the last attempt's."""
    if failure.cause is FailureCause.OVERLOADED:
        return unavailable("All workers are at their limit. Try again later.", retry_after=1.0)
    return internal_error("The model workers failed while generating. Try again.")


def turn_failed(failure: AttemptFailedError) -> ApiError:
    """Of a turn that only this worker could compute."""
    gone = failure.cause in (*LOST, FailureCause.SILENCE) or failure.code == DrainingError.code
    if gone:
        return session_lost()
    if failure.code == PausedError.code:
        return unavailable("The worker that keeps the session is paused. Try again later.", retry_after=1.0)
    return gave_up(failure)
