"""The condition tree: what `Ready` follows from, each with a reason for programs and a sentence for people.

    Valid ─ ModelAvailable ─ RedisReady ─ PrefillWorkersReady ─ DecodeWorkersReady ─ RouterReady
                                      all of them  →  Ready
    TransportReady, Progressing, AutoscalingActive, Degraded   tell more and do not count

`lastTransitionTime` moves only when the status does, so that an unchanged service is not written again and again.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from tandem_operator.api.conditions import Condition

Status = Literal["True", "False", "Unknown"]

VALID = "Valid"
MODEL_AVAILABLE = "ModelAvailable"
REDIS_READY = "RedisReady"
WORKERS_READY = {"prefill": "PrefillWorkersReady", "decode": "DecodeWorkersReady"}
ROUTER_READY = "RouterReady"
TRANSPORT_READY = "TransportReady"
READY = "Ready"
PROGRESSING = "Progressing"
AUTOSCALING_ACTIVE = "AutoscalingActive"
DEGRADED = "Degraded"

NEEDED = (VALID, MODEL_AVAILABLE, REDIS_READY, *WORKERS_READY.values(), ROUTER_READY)
"""What must be true for `Ready`, in the order in which people should look."""

MAX_MESSAGE = 4096
MAX_TROUBLE = 80


def condition(kind: str, status: bool | None, reason: str, message: str = "") -> Condition:
    """A condition of no time yet; None is "not known"."""
    word: Status = "Unknown" if status is None else "True" if status else "False"
    return Condition(type=kind, status=word, reason=reason, message=message[:MAX_MESSAGE])


def ready(conditions: Sequence[Condition]) -> Condition:
    """`Ready`, with reason and sentence of the first that is in its way."""
    by_type = {one.type: one for one in conditions}
    for kind in NEEDED:
        one = by_type.get(kind)
        if one is None:
            return condition(READY, None, f"{kind}Unknown", f"{kind} has not been checked yet")
        if one.status != "True":
            return condition(READY, False, one.reason, f"{kind}: {one.message}" if one.message else kind)
    return condition(READY, True, "CanaryPassed", "a request passed through prefill and decode")


def trouble_of(conditions: Sequence[Condition]) -> str:
    """What is wrong, as a column of `kubectl get` has it: the first of what people should look at, cut short."""
    bad = {VALID: "False", DEGRADED: "True", MODEL_AVAILABLE: "False", TRANSPORT_READY: "False"}
    by_type = {one.type: one for one in conditions}
    for kind, status in bad.items():
        one = by_type.get(kind)
        if one is not None and one.status == status:
            text = f"{one.reason}: {one.message}" if one.message else one.reason
            return text if len(text) <= MAX_TROUBLE else f"{text[: MAX_TROUBLE - 1]}…"
    return ""


def settled(
    conditions: Iterable[Condition], before: Iterable[Condition], *, generation: int, now: str
) -> list[Condition]:
    """With times: those of `before` where the status is the same, else `now` (RFC 3339)."""
    known = {one.type: one for one in before}
    result = []
    for one in conditions:
        old = known.get(one.type)
        same = old is not None and old.status == one.status and old.last_transition_time
        result.append(
            msgspec.structs.replace(
                one,
                observed_generation=generation,
                last_transition_time=old.last_transition_time if same and old is not None else now,
            )
        )
    return result
