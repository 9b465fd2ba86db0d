"""The number of this release, and which other releases it works with (docs/adr/0123-two-releases-in-one-fleet.md).

Processes name their release where they meet: a worker in its row in Redis, an engine in the `Peer` of each message to
another engine, a gateway in each request. Both sides refuse what is outside the window.
"""

RELEASE = 1
"""The minor version of the product: grows by one with each release that is not a patch. Commits before the first
release name none, which counts as 0."""

WINDOW = 2
"""Releases before this one that it works with. A newer release has the same window, so it is this one's as well."""

UNSTATED = 0


def skew(release: int) -> str:
    """Why this release does not work with `release`; "" where it does."""
    if abs(release - RELEASE) <= WINDOW:
        return ""
    return f"it is of release {release}, outside the window of release {RELEASE}: {WINDOW} releases before and after it"
