"""What flags take: argparse types, and sizes in GiB. Anything else is refused by name before anything is allocated."""

import argparse
import math

from tandem_engine.addresses import AddressError, bare_host
from tandem_engine.errors import ConfigError

GIB = 1 << 30


def positive_int(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    value = non_negative_int(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1, got 0")
    return value


def non_negative_int(text: str) -> int:
    """argparse type: decimal digits only; Python's own int() would take ' 5 ' and '1_000'."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def host_address(text: str) -> str:
    """argparse type: a name or an IP address; brackets around an IPv6 address are taken off."""
    try:
        return bare_host(text)
    except AddressError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive_float(text: str) -> float:
    """argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def bytes_of(flag: str, gib: float) -> int:
    """Bytes of a size in GiB. Raises `ConfigError` for what is no size."""
    if not math.isfinite(gib):
        raise ConfigError(f"{flag} must be a finite number of GiB, got {gib}")
    return int(gib * GIB)
