"""By when a request must be answered: the gateway's limit, or less where the client says so.

A client says it with the header `X-Request-Timeout` or with the body's `timeout`, both in seconds; the shortest counts.
The deadline goes with the request: to the queue, to the workers, to every retry.
"""

from tandem_engine.logs import quoted
from tandem_services.common.errors import bad_request
from tandem_services.gateway.boundary import TIMEOUT_HEADER, RequestIdentity


def deadline_of(identity: RequestIdentity, *, wanted_s: float | None, most_s: float) -> float:
    """On the gateway's clock. `wanted_s` is the body's. Raises `ApiError` 400 for what is no duration."""
    waits = [most_s]
    if wanted_s is not None:
        waits.append(_seconds(wanted_s, "timeout"))
    if identity.timeout is not None:
        waits.append(_seconds(identity.timeout, TIMEOUT_HEADER))
    return identity.arrived + min(waits)


def _seconds(value: float | str, name: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    # The comparison refuses NaN as well.
    if not 0 < seconds < float("inf"):
        raise bad_request(f"{name} must be a number of seconds above 0, got {quoted(value)}", name)
    return seconds
