"""The first thing that made it impossible for a rank to go on, and what should bring its engine to an end in order."""

from dataclasses import dataclass

from tandem_engine.errors import RankLostError


@dataclass(kw_only=True, slots=True)
class FirstFailure:
    """Written by the forward thread and by whoever watches the other ranks, read by the scheduler thread."""

    error: RankLostError | None = None

    def record(self, error: Exception) -> None:
        """Remember `error`, unless there was one before."""
        if self.error is None:
            self.error = error if isinstance(error, RankLostError) else _step_failed(error)

    def raise_if_any(self) -> None:
        """Raise the `RankLostError` that was recorded, if one was."""
        if self.error is not None:
            raise self.error


@dataclass(kw_only=True, slots=True)
class Departure:
    """Set by whoever watches other nodes, read by the scheduler thread."""

    reason: str | None = None
    """Why the engine should drain; None while nothing asks for it."""

    def ask(self, reason: str) -> None:
        """Remember `reason`, unless there was one before."""
        self.reason = self.reason or reason


def _step_failed(cause: Exception) -> RankLostError:
    error = RankLostError(
        f"a model step raised {type(cause).__name__} ({cause}); the ranks of an engine cannot continue separately"
    )
    error.__cause__ = cause
    return error
