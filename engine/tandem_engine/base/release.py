"""The product's version, the number of this release, and which other releases it works with.

The distribution states the version. It is `tandem-llm`, because `tandem` on the package index is another project;
commands and packages keep their names.

Processes name their release where they meet: a worker in its row in Redis, an engine in the `Peer` of each message to
another engine, a gateway in each request. Both sides refuse what is outside the window
(docs/adr/0123-two-releases-in-one-fleet.md).
"""

from importlib.metadata import version

DISTRIBUTION = "tandem-llm"
"""What to `pip install`."""


def product_version() -> str:
    """Such as `0.1.0`. Raises `PackageNotFoundError` where the source is on the path and nothing is installed."""
    return version(DISTRIBUTION)


def install_hint(extra: str) -> str:
    """The command that installs what `extra` brings."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


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
