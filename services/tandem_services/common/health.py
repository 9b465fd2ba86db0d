"""Liveness and readiness of a process.

/live    the process answers; independent of everything else, or a broken dependency would restart the fleet
/ready   every check passes, and the process is neither draining nor on standby; else load balancers remove it
"""

from collections.abc import Callable

import msgspec

Check = Callable[[], str | None]
"""Returns None when all is well, else one sentence with what is missing. Must not block."""


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/ready` and `/health`."""

    status: str
    """ok, draining, unavailable, or standby: all is well, but no requests are sent here yet."""
    reasons: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def http_status(self) -> int:
        return 200 if self.ok else 503


class Health:
    """Readiness checks by name. Not thread-safe: belongs to the event loop of its process."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._draining = False
        self._standby: Check = lambda: None

    def add_check(self, name: str, check: Check) -> None:
        self._checks[name] = check

    def stand_by_until(self, check: Check) -> None:
        """While `check` names something and all others pass, report "standby"."""
        self._standby = check

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Report not ready from now on, so that no new work is sent here."""
        self._draining = True

    def report(self) -> HealthReport:
        if self._draining:
            return HealthReport(status="draining", reasons=("shutting down",))
        failed = [f"{name}: {reason}" for name, check in self._checks.items() if (reason := check()) is not None]
        if failed:
            return HealthReport(status="unavailable", reasons=tuple(failed))
        waits = self._standby()
        return HealthReport(status="ok") if waits is None else HealthReport(status="standby", reasons=(waits,))
