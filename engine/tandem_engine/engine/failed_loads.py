"""Adapters that could not be loaded for a request.

refused     for `REFUSED_S`: retries of the request would read the folder each time
reported    for `REPORTED_S` after the last failure, or until one is loaded under the name: for statuses
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import escape
from tandem_engine.config.adapters import check_adapter_name
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
    report: FailedAdapter | None
    """None under a name that no adapter can have."""
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
        self._failures[ref.digest] = _Failure(_report_of(ref, reason), reason, now)
        self._refused.add(ref.digest)
        self.changes += 1

    def loaded(self, name: str, digest: bytes) -> None:
        """It is in memory. Failures with other content that the name stood for are over, too."""
        self.forget(digest)
        former = [
            each
            for each, failure in self._failures.items()
            if failure.report is not None and failure.report.name == name
        ]
        for each in former:
            self.forget(each)

    def forget(self, digest: bytes) -> None:
        """Neither refuse nor report it."""
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
        reports = [failure.report for failure in self._failures.values() if failure.report is not None]
        return tuple(sorted(reports[-MAX_FAILED_ADAPTERS:], key=lambda report: (report.name, report.digest)))


def _report_of(ref: AdapterRef, reason: str) -> FailedAdapter | None:
    """Readers refuse a whole report with a name, or with text, that is not well-formed."""
    try:
        check_adapter_name(ref.name)
    except ConfigError:
        return None
    return FailedAdapter(name=ref.name, digest=ref.digest.hex(), reason=escape(reason)[:MAX_FAILURE_TEXT])
