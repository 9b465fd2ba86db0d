"""The text that travels with a push: which pages of which grant it wrote.

    room|generation|first|count

Rooms are chosen by the gateway and may hold any character, the separator included: fields are split from
the right. Numbers are plain decimal; whatever else arrives is not ours.
"""

import re

from tandem_engine.disaggregation.transport import PushKey
from tandem_engine.errors import WireError

MAX_NOTIFICATION_BYTES = 1024
_PATTERN = re.compile(
    r"(?P<room>.+)\|(?P<generation>\d{1,18})\|(?P<first>\d{1,9})\|(?P<count>\d{1,9})",
    re.DOTALL | re.ASCII,
)


def encode_notification(key: PushKey) -> bytes:
    return f"{key.room}|{key.generation}|{key.first}|{key.count}".encode()


def decode_notification(data: bytes) -> PushKey:
    """Raises `WireError` for anything `encode_notification` would not have written."""
    if len(data) > MAX_NOTIFICATION_BYTES:
        raise WireError(f"notification of {len(data)} bytes is over the limit of {MAX_NOTIFICATION_BYTES}")
    try:
        match = _PATTERN.fullmatch(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise WireError(f"notification is not UTF-8: {error}") from error
    if match is None:
        raise WireError("notification is not room|generation|first|count")
    return PushKey(
        room=match["room"],
        generation=int(match["generation"]),
        first=int(match["first"]),
        count=int(match["count"]),
    )
