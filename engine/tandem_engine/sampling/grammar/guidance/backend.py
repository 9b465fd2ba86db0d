"""llguidance as the grammar backend: probed in a process of its own, compiled here, followed by copies.

    spec ──probe process──▶ llguidance grammar ──LLMatcher──▶ prototype ──deep_copy──▶ matcher per output

The second compilation costs what the first was seen to cost, without the interpreter lock.
"""

from dataclasses import dataclass, field
from threading import Lock

from tandem_engine.config import GrammarConfig
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.sampling.grammar.backend import CompiledGrammar
from tandem_engine.sampling.grammar.guidance.limits import new_matcher
from tandem_engine.sampling.grammar.guidance.matcher import GuidanceGrammar
from tandem_engine.sampling.grammar.guidance.probe import ProbeSetup
from tandem_engine.sampling.grammar.guidance.prober import Prober
from tandem_engine.sampling.grammar.guidance.translate import refusal
from tandem_engine.sampling.grammar.guidance.vocabulary import GuidanceVocabulary


@dataclass(kw_only=True, slots=True)
class GuidanceBackend:
    """Implements `GrammarBackend`. As many probe processes as threads ever compiled at once."""

    vocabulary: GuidanceVocabulary
    config: GrammarConfig
    _idle: list[Prober] = field(default_factory=list)
    _all: list[Prober] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        prober = self._take()
        try:
            grammar = prober.probe(spec)
        finally:
            self._idle.append(prober)
        tokenizer = self.vocabulary.tokenizer()
        prototype = new_matcher(tokenizer, grammar)
        if prototype.is_error():
            raise refusal(spec.kind, prototype.get_error())
        return GuidanceGrammar(prototype=prototype, words=-(-tokenizer.vocab_size // 32))

    def close(self) -> None:
        with self._lock:
            for prober in self._all:
                prober.close()

    def _take(self) -> Prober:
        """The one that was used last, so that one process does it all while it can."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            setup = ProbeSetup(
                tokenizer_file=str(self.vocabulary.tokenizer_file),
                vocab_size=self.vocabulary.vocab_size,
                eos_token_ids=self.vocabulary.eos_token_ids,
                cpu_seconds=self.config.compile_timeout,
                memory_bytes=self.config.compile_memory_bytes,
            )
            prober = Prober(setup=setup)
            self._all.append(prober)
            return prober
