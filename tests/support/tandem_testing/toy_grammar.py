"""Grammars over the fake model's tokens, simple enough to follow by hand.

rule    the next token t of an output must satisfy (t + sum of the output) % every == 0
end     after `length` tokens nothing may follow; from `optional` tokens on EOS may come instead
stuck   after this many tokens the matcher has a problem
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.forward.batch import TokenMasks
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.sampling.grammar.backend import Bits, CompiledGrammar, Matcher
from tandem_engine.sampling.grammar.compiler import GrammarCache

VOCAB = 97
EOS = 0
WORDS = 4


class ToyRule(msgspec.Struct, frozen=True):
    every: int = 3
    length: int = 1000
    optional: int = 1000
    stuck: int = 1000
    name: str = ""
    """Makes rules that are alike different grammars."""

    def allowed(self, outputs: Sequence[int]) -> set[int]:
        total = sum(outputs)
        tokens = {token for token in range(1, VOCAB) if (token + total) % self.every == 0}
        return tokens | {EOS} if len(outputs) >= self.optional else tokens

    def ended(self, outputs: Sequence[int]) -> bool:
        return len(outputs) >= self.length or (EOS in outputs)


def toy_grammar(**rule: object) -> GrammarSpec:
    """The specification of a `ToyRule`."""
    return GrammarSpec(kind=GrammarKind.REGEX, source=msgspec.json.encode(ToyRule(**rule)).decode())


def toy_rule(spec: GrammarSpec) -> ToyRule:
    return msgspec.json.decode(spec.source, type=ToyRule)


def make_masks(allowed: Mapping[int, Collection[int]], *, words: int) -> TokenMasks:
    """Released masks that allow, in each of the given rows of the logits, the given tokens."""
    masks = TokenMasks.open(tuple(allowed), words)
    for bits, tokens in zip(masks.bitmask.numpy(), allowed.values(), strict=True):
        bits[:] = pack(tokens, words)
    masks.release()
    return masks


def pack(tokens: Collection[int], words: int) -> Bits:
    """The mask that allows `tokens`."""
    bits = np.zeros(words * 32, dtype=np.uint8)
    bits[sorted(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpack(bits: Bits) -> set[int]:
    """The tokens that a mask allows."""
    return {*np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()}


class ToyMatcher:
    """Implements `Matcher`."""

    def __init__(self, rule: ToyRule) -> None:
        self.rule = rule
        self.seen: list[int] = []
        self.problem: str | None = None

    @property
    def ended(self) -> bool:
        return self.rule.ended(self.seen)

    def accept(self, tokens: Sequence[int]) -> int:
        for taken, token in enumerate(tokens):
            if self.ended or token not in self.rule.allowed(self.seen):
                return taken
            self.seen.append(token)
        return len(tokens)

    def rollback(self, tokens: int) -> None:
        del self.seen[len(self.seen) - tokens :]

    def fill(self, row: Bits) -> None:
        row[:] = pack(self.rule.allowed(self.seen), WORDS)
        if len(self.seen) >= self.rule.stuck:
            self.problem = "no token fits"


class ToyGrammar:
    """Implements `CompiledGrammar`."""

    words = WORDS

    def __init__(self, rule: ToyRule) -> None:
        self.rule = rule

    def matcher(self) -> Matcher:
        return ToyMatcher(self.rule)


class SlowFuture(Future[CompiledGrammar]):
    """Is done once it has been asked `polls` times."""

    def __init__(self, polls: int, rule: ToyRule) -> None:
        super().__init__()
        self._polls = polls
        self._rule = rule

    def done(self) -> bool:
        self._polls -= 1
        if self._polls < 0 and not super().done():
            self.set_result(ToyGrammar(self._rule))
        return super().done()


class ToyGrammars:
    """Implements `Grammars`. With `hold` a grammar is compiled when the test says so, with `polls` after a while."""

    def __init__(self, *, hold: bool = False, polls: int = 0) -> None:
        self.hold = hold
        self.polls = polls
        self.pending: dict[GrammarSpec, Future[CompiledGrammar]] = {}
        self.compiled = 0
        self._cache = GrammarCache(100)

    def find(self, spec: GrammarSpec) -> CompiledGrammar | None:
        return self._cache.find(spec)

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        self.compiled += 1
        if not self.hold:
            return SlowFuture(self.polls, toy_rule(spec))
        return self.pending.setdefault(spec, Future())

    def finish(self, spec: GrammarSpec) -> None:
        self.pending.pop(spec).set_result(ToyGrammar(toy_rule(spec)))

    def fail(self, spec: GrammarSpec, error: Exception) -> None:
        self.pending.pop(spec).set_exception(error)

    def keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        self._cache.keep(spec, compiled)

    def keep_refusal(self, spec: GrammarSpec, refusal: InvalidRequestError) -> None:
        self._cache.keep_refusal(spec, refusal)

    def acknowledge(self) -> None:
        """Tests look for themselves."""
