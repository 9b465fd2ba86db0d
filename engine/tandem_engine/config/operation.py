"""What an operator may ask of a running engine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationConfig:
    """What an operator may ask of a running engine, and where its files go."""

    torch_profiler_dir: str = ""
    """Traces are written here; empty refuses to trace."""
    crash_dump_folder: str = ""
    """State of a hang is written here; empty takes standard error."""
