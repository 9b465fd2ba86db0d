"""Fixtures of the gateway's tests: a tokenizer, mock engines, and a live gateway in front of them."""

from collections.abc import Iterator

import pytest

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.gateway_builders import EngineRack, live_gateway
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.tokenizer_builders import EOS, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("gateway-tokenizer")))


@pytest.fixture
def rack() -> Iterator[EngineRack]:
    with EngineRack() as rack:
        yield rack


@pytest.fixture
async def gateway(rack, tokenizer):
    """One engine that computes alone and answers tokens hashed from the prompt."""
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250), eos=EOS))
    async with live_gateway(rack.context, tokenizer, rack.engines) as live:
        yield live
