"""What prefix fetches count since start, for the engine's statistics."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class PrefixCounters:
    """Monotonic counts of one engine, both ends together."""

    asked: int = 0
    """Fetches begun."""
    fetched: int = 0
    """Of those, the ones that brought at least a page."""
    missed: int = 0
    """Those that found nothing: the other engine had lost it, or refused."""
    failed: int = 0
    """Those that were given up: late, torn, or with their peer lost."""
    skipped: int = 0
    """Fetches that a request named and that were not begun: it is here by now, or memory is short."""
    pages: int = 0
    """Brought here."""
    bytes: int = 0
    wait_s: float = 0.0
    """From asking to the end, of all that ended."""
    lent: int = 0
    """Asks of others that were served."""
    lent_pages: int = 0
    quarantined: int = 0
    """Holds whose writer did not acknowledge in time."""
    digest_mismatches: int = 0
    ignored: int = 0
    """Messages for fetches that are not, or no longer, this engine's."""
