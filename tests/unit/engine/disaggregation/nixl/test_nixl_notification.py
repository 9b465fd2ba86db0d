"""The text that says which pages were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.disaggregation.nixl.notification import decode_notification, encode_notification
from tandem_engine.disaggregation.transport import PushKey
from tandem_engine.errors import WireError


@given(
    room=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100),
    generation=st.integers(0, 10**18 - 1),
    first=st.integers(0, 10**9 - 1),
    count=st.integers(1, 10**9 - 1),
)
def test_every_key_comes_back(room, generation, first, count):
    key = PushKey(room=room, generation=generation, first=first, count=count)
    assert decode_notification(encode_notification(key)) == key


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"room",
        b"room|1|2",
        b"|1|2|3",
        b"room|1|2|3|",
        b"room|1|2|-3",
        b"room|1|2|+3",
        b"room|1|2| 3",
        b"room|1|2|3\n",
        b"room|1|2|3x",
        b"room|1|2|1234567890",
        "room|1|2|\N{ARABIC-INDIC DIGIT THREE}".encode(),
        b"\xff|1|2|3",
        b"r" * 2000 + b"|1|2|3",
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(WireError, match="notification"):
        decode_notification(data)
