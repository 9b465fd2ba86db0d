"""The product's version, as its distribution states it.

The distribution is `tandem-llm`, because `tandem` on the package index is another project. Commands and packages keep
their names.
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
