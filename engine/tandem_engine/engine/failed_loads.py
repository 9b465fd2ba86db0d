"""Adapters that could not be loaded for a request.

refused     for `REFUSED_S`: retries of the request would read the folder each time
reported    for `REPORTED_S` after the last failure, or until the adapter is loaded: the reason is in statuses
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem_engine.messages.control import (
    MAX_FAILED_ADAPTERS,
    MAX_FAILURE_TEXT,
    MAX_REFUSED_ADAPTERS,
    FailedAdapter,
)
from tandem_engine.messages.requests import AdapterRef

REFUSED_S = 15.0
REPORTED_S = 600.0


@dataclass(frozen=True, slots=True)
class _Failure:
    report: FailedAdapter
    reason: str
    """Whole."""
    at: float


@dataclass(kw_only=True, slots=True)
class FailedLoads:
    """Of one engine. `now`: seconds of the clock that all ranks agree on."""

    changes: int = 0
    """Grows whenever `refused` or `reported` changes."""
    _failures: dict[bytes, _Failure] = field(default_factory=dict)
    """By digest, the newest last."""
    _refused: set[bytes] = field(default_factory=set)

    def note(self, ref: AdapterRef, reason: str, *, now: float) -> None:
        """A load has failed."""
        self._failures.pop(ref.digest, None)
        while len(self._failures) >= MAX_REFUSED_ADAPTERS:
            self.forget(next(iter(self._failures)))
        report = FailedAdapter(name=ref.name, digest=ref.digest.hex(), reason=reason[:MAX_FAILURE_TEXT])
        self._failures[ref.digest] = _Failure(report, reason, now)
        self._refused.add(ref.digest)
        self.changes += 1

    def forget(self, digest: bytes) -> None:
        """It is loaded, or no name stands for it any more."""
        if self._failures.pop(digest, None) is not None:
            self._refused.discard(digest)
            self.changes += 1

    def refusal(self, digest: bytes, *, now: float) -> str | None:
        """Why it is not to be read again yet; None if it may be."""
        self.expire(now)
        return self._failures[digest].reason if digest in self._refused else None

    def expire(self, now: float) -> None:
        """Forget what is over."""
        for digest in [each for each, failure in self._failures.items() if now - failure.at >= REPORTED_S]:
            self.forget(digest)
        over = {each for each in self._refused if now - self._failures[each].at >= REFUSED_S}
        if over:
            self._refused -= over
            self.changes += 1

    @property
    def refused(self) -> Iterator[bytes]:
        """Digests."""
        return iter(self._refused)

    @property
    def reported(self) -> tuple[FailedAdapter, ...]:
        """The newest failures, by name."""
        newest = [failure.report for failure in self._failures.values()][-MAX_FAILED_ADAPTERS:]
        return tuple(sorted(newest, key=lambda report: (report.name, report.digest)))
