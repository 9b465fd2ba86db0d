"""The chain of a prompt that is asked for again is that of the first time; that of another one is its own."""

import pytest

from tandem_engine.messages.kv_events import BASE_SPACE, CacheSpace, chain_hashes, chain_seed
from tandem_services.router import index as module
from tandem_services.router.index import LastChain

PROMPT = tuple(range(64))


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """Tokens of each call that hashes."""
    calls: list[int] = []

    def counted(token_ids, page_size, *, parent):
        calls.append(len(token_ids))
        return chain_hashes(token_ids, page_size, parent=parent)

    monkeypatch.setattr(module, "chain_hashes", counted)
    return calls


async def test_repeated_prompt_is_hashed_once(hashed):
    last = LastChain()
    chains = [await last.of(PROMPT, 16, space=BASE_SPACE, most_blocks=100) for _ in range(3)]
    assert chains[0] == chains[1] == chains[2] == chain_hashes(PROMPT, 16, parent=chain_seed(""))
    assert hashed == [64]


@pytest.mark.parametrize(
    ("prompt", "page_size", "space", "most_blocks"),
    [
        ((*PROMPT[:-1], 99), 16, BASE_SPACE, 100),
        (PROMPT, 8, BASE_SPACE, 100),
        (PROMPT, 16, CacheSpace("other"), 100),
        (PROMPT, 16, CacheSpace(adapter=b"a" * 16), 100),
        (PROMPT, 16, BASE_SPACE, 2),
    ],
)
async def test_last_chain_rehashes_for_different_inputs(prompt, page_size, space, most_blocks):
    last = LastChain()
    await last.of(PROMPT, 16, space=BASE_SPACE, most_blocks=100)
    found = await last.of(prompt, page_size, space=space, most_blocks=most_blocks)
    assert found == chain_hashes(prompt, page_size, parent=space.seed)[:most_blocks]
    assert await last.of(PROMPT, 16, space=BASE_SPACE, most_blocks=100) == chain_hashes(
        PROMPT, 16, parent=chain_seed("")
    )
