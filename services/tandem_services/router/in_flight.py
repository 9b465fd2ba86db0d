"""Prompts in flight: blocks that a worker will have cached soon, because a prompt with them was sent to it.

The index contains a block only after it is computed. Until then these records route equal prompts that arrive together
to one worker. `scripts/in_flight.lua` does the same in Redis for all gateways and gives the reasons. This module covers
the choices of this gateway while Redis is unavailable.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tandem_engine.base.clock import Clock
from tandem_services.router.keys import DIGEST_BYTES, MAX_NAMED_BLOCKS


def named_blocks(chain: bytes) -> bytes:
    """Digests of the blocks of `chain` that a routing call names."""
    blocks = len(chain) // DIGEST_BYTES
    if named_step(blocks) == 1:
        return chain
    return b"".join([chain[(end - 1) * DIGEST_BYTES : end * DIGEST_BYTES] for end in named_positions(blocks)])


def named_positions(blocks: int) -> Sequence[int]:
    """Positions of the named blocks of a prompt with `blocks` blocks; the first block is number 1."""
    step = named_step(blocks)
    return range(1, blocks + 1) if step == 1 else (*range(step, blocks, step), blocks)


def named_step(blocks: int) -> int:
    """The least power of two by which at most `MAX_NAMED_BLOCKS` of a prompt's blocks are named.

    A power of two, so that prompts of different lengths with a common prefix name the same blocks of it.
    """
    return 1 << max(0, (blocks - 1) // MAX_NAMED_BLOCKS).bit_length()


EXPIRY_FACTOR = 2
"""A note counts this many times as long as computing its prompt is predicted to take, with the queue before it."""

EXPIRY_SLACK_MS = 500
"""Added to the expiry, because the index receives a block some time after it is computed."""

NOTES_OF_DECISION = 32
"""Max. notes of a long prompt, so that a decision stays cheap: its common prefix with another prompt is known to 3 % of
it. Equal prompts match completely, because the last block has a note."""

MAX_NOTES = 131_072
"""In Redis. Beyond that the notes of the oldest decision are dropped."""

MAX_OWN_NOTES = 65_536
"""In a gateway."""


@dataclass(eq=False, slots=True)
class _Prompt:
    incarnation: str
    digests: Sequence[bytes]
    expires: float


@dataclass(kw_only=True, slots=True)
class PromptsInFlight:
    """Notes of the prompts that one gateway has sent to workers."""

    clock: Clock
    _notes: dict[bytes, dict[str, _Prompt]] = field(default_factory=dict)
    _prompts: OrderedDict[int, _Prompt] = field(default_factory=OrderedDict)
    _kept: int = 0

    def note(self, number: int, chain: Sequence[bytes], incarnation: str, seconds: float) -> None:
        """The worker will have computed the prompt with these blocks in `seconds`. `take_back` uses `number`."""
        self._drop_old()
        expires = self.clock.now() + EXPIRY_FACTOR * seconds + EXPIRY_SLACK_MS / 1000
        known = self.matches(chain).get(incarnation, 0)
        prompt = _Prompt(incarnation, [digest for position, digest in _named(chain) if position > known], expires)
        for digest in prompt.digests:
            self._notes.setdefault(digest, {})[incarnation] = prompt
        self._prompts[number] = prompt
        self._kept += len(prompt.digests)

    def take_back(self, number: int) -> None:
        """The request has ended, or was never sent. A number that is not known changes nothing."""
        prompt = self._prompts.pop(number, None)
        if prompt is None:
            return
        self._kept -= len(prompt.digests)
        for digest in prompt.digests:
            holders = self._notes.get(digest, {})
            if holders.get(prompt.incarnation) is prompt:
                del holders[prompt.incarnation]
                if not holders:
                    del self._notes[digest]

    def matches(self, chain: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `chain` that workers will have, by incarnation."""
        self._drop_old()
        if not self._notes:
            return {}
        now, found = self.clock.now(), dict[str, int]()
        for position, digest in reversed(list(_named(chain))):
            for incarnation, prompt in self._notes.get(digest, {}).items():
                if prompt.expires > now:
                    found.setdefault(incarnation, position)
        return found

    def _drop_old(self) -> None:
        now = self.clock.now()
        while self._prompts:
            number, prompt = next(iter(self._prompts.items()))
            if prompt.expires > now and self._kept <= MAX_OWN_NOTES:
                return
            self.take_back(number)


def _named(chain: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((position, chain[position - 1]) for position in named_positions(len(chain)))
