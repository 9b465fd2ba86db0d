"""Canary requests: proof that a prefill and a decode worker serve together, and that a gateway reaches them.

A gateway runs them on its administrators' port (`POST /canary`): greedy, a few tokens, bounded by a deadline, charged
to nobody. It answers `passed` only when every token came and KV moved from prefill to decode. A revision's canary names
two of its pods; the service's leaves the choice to the router.
"""

from collections.abc import Iterable

import httpx

from tandem_operator.planning.observed import Canary
from tandem_operator.telemetry.fetching import ADMIN_PORT
from tandem_operator.telemetry.orders import OrderFailedError, post_order
from tandem_operator.telemetry.pods import PodSeen

WITHIN_S = 20.0
"""A pair that has just started may compile a kernel first."""
ANSWER_S = 5.0
"""For the gateway to say so, after the deadline of the request itself."""
MAX_MESSAGE = 512


def pair_of(revision: str, pods: Iterable[PodSeen]) -> tuple[PodSeen, PodSeen] | None:
    """A prefill and a decode pod of one revision, ready or on standby; None while there are none.

    Always the same ones, and ready ones first: what they say of a revision counts for those on standby.
    """
    usable = sorted(
        (pod for pod in pods if pod.usable and pod.revision == revision), key=lambda pod: (pod.standby, pod.name)
    )
    prefill = next((pod for pod in usable if pod.role == "prefill"), None)
    decode = next((pod for pod in usable if pod.role == "decode"), None)
    return None if prefill is None or decode is None else (prefill, decode)


async def run_canary(
    client: httpx.AsyncClient,
    gateway: PodSeen,
    token: str,
    *,
    pair: tuple[PodSeen, PodSeen] | None = None,
    within_s: float = WITHIN_S,
) -> Canary:
    """One canary through `gateway`: through this prefill and decode pod, or through whom the router chooses.

    What goes wrong, the gateway's own silence included, is a canary that has not passed, with the reason. `token` is
    that of `orders.order_token`.
    """
    body: dict[str, str | float] = {"within_s": within_s}
    if pair is not None:
        body |= {"prefill": pair[0].name, "decode": pair[1].name}
    try:
        answer = await post_order(
            client, gateway, ADMIN_PORT, "/canary", body, token=token, within_s=within_s + ANSWER_S
        )
    except OrderFailedError as error:
        return Canary(passed=False, message=str(error)[:MAX_MESSAGE])
    return Canary(passed=answer.get("passed") is True, message=str(answer.get("message", ""))[:MAX_MESSAGE])
