"""What the transfer stages count since start, for the engine's statistics."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class TransferCounters:
    """Monotonic counts of one engine, both sides of transfers together."""

    moves: int = 0
    """Grants given, and signs that more was written: it grows while transfers to here go on."""
    committed: int = 0
    """Transfers received whole and verified."""
    handed_over: int = 0
    """Transfers sent whole."""
    exposed_s: float = 0.0
    """Of those: from the end of the prompt's computation until everything was out."""
    failed: int = 0
    """Transfers that ended otherwise, on either side, aborts by the gateway excepted."""
    moved: int = 0
    """Running requests of this engine that were handed over."""
    moves_failed: int = 0
    """Of the failed: those of running requests. They are computed again elsewhere."""
    bytes_received: int = 0
    """Of committed transfers."""
    digest_mismatches: int = 0
    quarantined: int = 0
    """Holds whose writer did not acknowledge in time."""
    ignored: int = 0
    """Messages about transfers that are not, or no longer, this engine's."""
