"""What a mock engine does unless a test wants it otherwise."""

from typing import Any

from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS

TOKEN = hash_tokens(3, 250)
"""A prompt determines every token of the answer."""


def healthy(**knobs: Any) -> MockBehavior:
    """Answers every request at once, but for what `knobs` say."""
    return MockBehavior(**{"token": TOKEN, "eos": EOS, **knobs})
