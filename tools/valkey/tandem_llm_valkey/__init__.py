"""A Valkey server for Tandem on one machine, as a file of this package."""

from pathlib import Path


def server_path() -> Path:
    """The program, `valkey-server`."""
    return Path(__file__).with_name("valkey-server")
