"""Compiling beside the loop."""

import select
import threading

import pytest

from tandem_engine.base.errors import GrammarCompilerError, InvalidRequestError
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.sampling.grammar.backend import CompiledGrammar
from tandem_engine.sampling.grammar.compiler import WORKERS, GrammarCompiler, NoGrammars
from tandem_testing.toy_grammar import ToyGrammar, toy_grammar, toy_rule
from tandem_testing.waiting import wait_for

WAIT = 60.0


class GatedBackend:
    """Compiles when the gate is open; refuses rules called "bad"."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.busy = threading.Semaphore(0)
        self.closed = False

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.busy.release()
        assert self.gate.wait(WAIT)
        if self.closed:
            raise GrammarCompilerError("closed")
        rule = toy_rule(spec)
        if rule.name == "bad":
            raise InvalidRequestError("a bad rule", param="grammar")
        return ToyGrammar(rule)

    def close(self) -> None:
        self.closed = True
        self.gate.set()


@pytest.fixture
def backend():
    return GatedBackend()


@pytest.fixture
def compiler(backend):
    compiler = GrammarCompiler(backend, cache_size=4)
    yield compiler
    compiler.close()


def readable(compiler: GrammarCompiler, timeout: float) -> bool:
    return bool(select.select([compiler.fileno()], [], [], timeout)[0])


def test_compiled_grammar_wakes_the_idle_loop(compiler, backend):
    spec = toy_grammar()
    future = compiler.compile(spec)
    assert not readable(compiler, 0.0)
    backend.gate.set()
    assert readable(compiler, WAIT)
    compiled = future.result(WAIT)
    acknowledge_all(compiler)
    assert not readable(compiler, 0.0)
    compiler.keep(spec, compiled)
    assert compiler.find(spec) is compiled


def acknowledge_all(compiler: GrammarCompiler) -> None:
    """As a loop does, which is woken until the flag that follows the byte is up."""

    def quiet() -> bool:
        compiler.acknowledge()
        return not readable(compiler, 0.0)

    wait_for(quiet, WAIT)


def test_cancelled_compilation_wakes_no_request(compiler, backend):
    futures = [compiler.compile(toy_grammar(name=str(number))) for number in range(WORKERS + 1)]
    assert futures[-1].cancel()
    assert not readable(compiler, 0.0)
    compiler.acknowledge()


def test_rejected_grammar_is_rejected_from_cache(compiler):
    spec = toy_grammar(name="bad")
    compiler.keep_refusal(spec, InvalidRequestError("a bad rule", param="grammar"))
    with pytest.raises(InvalidRequestError, match="a bad rule"):
        compiler.find(spec)


def test_slow_grammar_does_not_hold_up_all_others(compiler, backend):
    for number in range(WORKERS):
        compiler.compile(toy_grammar(name=str(number)))
    for _ in range(WORKERS):
        assert backend.busy.acquire(timeout=WAIT)


def test_closing_cancels_running_and_queued_compilations(backend):
    compiler = GrammarCompiler(backend, cache_size=4)
    futures = [compiler.compile(toy_grammar(name=str(number))) for number in range(WORKERS + 3)]
    for _ in range(WORKERS):
        assert backend.busy.acquire(timeout=WAIT)
    compiler.close()
    compiler.close()
    assert all(future.cancelled() or future.exception() is not None for future in futures)


def test_engine_without_grammars_reports_reason():
    with pytest.raises(InvalidRequestError, match="regex output is not available: no tokenizer"):
        NoGrammars("no tokenizer").find(toy_grammar())
