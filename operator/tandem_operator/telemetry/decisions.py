"""The last decisions as status and events tell them.

A hold that lasts is told once: its sentence has figures in it that change each period, and a status that changed with
them would be written for ever.
"""

import re
from collections.abc import Iterable, Sequence

from tandem_operator.api.model_service import Decision as Told
from tandem_operator.scaling.law import Decision

MOST = 10
MAX_REASON = 1024
_FIGURES = re.compile(r"[\d.]+")


def remembered(before: Sequence[Told], new: Iterable[Decision], now: str) -> list[Told]:
    """Newest first, at most `MOST`; `before` itself where nothing is new. `now`: RFC 3339."""
    told = list(before)
    for decision in worth_telling(before, new):
        told.insert(0, _told(decision, now))
    return told[:MOST]


def worth_telling(before: Sequence[Told], new: Iterable[Decision]) -> list[Decision]:
    """Those of `new` that say something else than the last one that was told: these become events."""
    told: list[Decision] = []
    last = _kind(before[0].action, before[0].reason) if before else None
    for decision in new:
        kind = _kind(decision.action, decision.reason)
        if decision.action != "hold" or kind != last:
            told.append(decision)
            last = kind
    return told


def event_of(decision: Decision) -> tuple[str, str, str]:
    """Type, reason and message of a Kubernetes event."""
    if decision.action == "hold":
        return "Warning", "ScalingHeld", f"{decision.after} workers stay: {decision.reason}"
    if decision.action == "flip":
        return "Normal", "RolesFlipped", f"{decision.after} workers flip {decision.reason}"
    direction = "up" if decision.after > decision.before else "down"
    change = f"{decision.role} from {decision.before} to {decision.after}"
    return "Normal", f"Scaled{direction.capitalize()}", f"{change}: {decision.reason}"


def _told(decision: Decision, now: str) -> Told:
    return Told(
        time=now,
        role=decision.role,
        action=decision.action,
        before=decision.before,
        after=decision.after,
        reason=decision.reason[:MAX_REASON],
    )


def _kind(action: str, reason: str) -> tuple[str, str]:
    return action, _FIGURES.sub("#", reason)
