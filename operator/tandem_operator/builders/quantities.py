"""Amounts as Kubernetes writes them."""

import re
from decimal import Decimal

_FACTORS = {
    "": Decimal(1),
    "m": Decimal(1) / 1000,
    **{prefix: Decimal(1000) ** power for power, prefix in enumerate(("k", "M", "G", "T", "P"), start=1)},
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate(("K", "M", "G", "T", "P"), start=1)},
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")


def parse_quantity(text: int | str) -> Decimal:
    """The number that `text` stands for: bytes, cores, devices. Raises `ValueError` when it is no quantity."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{text!r} is no quantity: write it like 2, 500m or 16Gi")
    return Decimal(match[1]) * _FACTORS[match[2]]
