"""argparse types for numbers that have bounds. A bad one is a usage error that names its flag."""

import argparse
import math

from tandem_engine.flags import non_negative_int


def port_number(text: str) -> int:
    """0 to 65535."""
    port = non_negative_int(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"must be between 0 and 65535, got {text}")
    return port


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def non_negative_float(text: str) -> float:
    """A finite number of at least 0."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def fraction(text: str) -> float:
    """0 to 1."""
    value = _finite(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value
