"""llguidance as the grammar backend: probed in a separate process, compiled here, matched by copies.

    spec ──probe process──▶ llguidance grammar ──LLMatcher──▶ prototype ──deep_copy──▶ matcher per output

The second compilation costs what the first was measured to cost, without the interpreter lock.

llguidance's matcher has two ends. After a token that its grammar allows nothing to follow, it stops at once; where the
output may end or continue, it allows EOS and stops when that was accepted. It also stops, with an error, when a step
hits a limit or no token fits.
"""

import logging
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EAGAIN
from threading import Lock

import msgspec
from llguidance import LLMatcher

from tandem_engine.base.cgroups import describe_process_limit
from tandem_engine.base.errors import EngineError, GrammarCompilerError, InvalidRequestError
from tandem_engine.config import GrammarConfig
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.sampling.grammar.backend import Bits, CompiledGrammar, Matcher
from tandem_engine.sampling.grammar.guidance.probe import (
    Compilable,
    ProbeJob,
    ProbeReply,
    ProbeSetup,
    Ready,
    Refused,
    Unusable,
    new_matcher,
    read_message,
    write_message,
)
from tandem_engine.sampling.grammar.guidance.translate import GuidanceVocabulary, refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class GuidanceGrammar:
    """Implements `CompiledGrammar`: a matcher that is only ever copied."""

    prototype: LLMatcher
    words: int

    def matcher(self) -> Matcher:
        return GuidanceMatcher(self.prototype.deep_copy())


class GuidanceMatcher:
    """Implements `Matcher`."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def problem(self) -> str | None:
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else None

    def accept(self, tokens: Sequence[int]) -> int:
        return self._matcher.try_consume_tokens([*tokens])

    def rollback(self, tokens: int) -> None:
        if tokens:
            done = self._matcher.rollback(tokens)
            assert done, f"rollback of {tokens} tokens: {self._matcher.get_error()}"

    def fill(self, row: Bits) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


logger = logging.getLogger(__name__)

START_TIMEOUT = 60.0
"""Seconds from the start of a process until its tokenizer is built."""

WALL_FACTOR = 5.0
"""A probe may take this many times its CPU time: it is nice, and the machine may be busy."""

STOP_TIMEOUT = 5.0


@dataclass(kw_only=True, slots=True, eq=False)
class Prober:
    """Used by one thread at a time; `close` may come from another."""

    setup: ProbeSetup
    _process: "subprocess.Popen[bytes] | None" = None
    _closed: bool = False
    _in_use: Lock = field(default_factory=Lock)

    def probe(self, spec: GrammarSpec) -> str:
        """The grammar in llguidance's terms, once it has been compiled within the limits.

        Raises:
            InvalidRequestError: it is wrong, or hit a limit.
            GrammarCompilerError: the process could not be started, or was stopped.
        """
        with self._in_use:
            process = self._running() or self._start()
            reply = self._ask(process, spec)
            if reply is None:
                self._process = None
        if isinstance(reply, Compilable):
            return reply.grammar
        if isinstance(reply, Refused):
            raise InvalidRequestError(reply.error, param="grammar")
        raise self._cause_of_death(process, spec)

    def close(self) -> None:
        """End the process; a probe under way fails first."""
        self._closed = True
        process = self._process
        if process is None:
            return
        process.kill()
        with self._in_use:
            _reap(process)
            self._process = None

    def _running(self) -> "subprocess.Popen[bytes] | None":
        """The process, unless something has ended it while it waited: that is no grammar's fault."""
        if self._process is not None and self._process.poll() is not None:
            _reap(self._process)
            self._process = None
        return self._process

    def _start(self) -> "subprocess.Popen[bytes]":
        """A process that is ready."""
        if self._closed:
            raise _shut_down()
        argument = msgspec.json.encode(self.setup).decode()
        command = [sys.executable, "-m", "tandem_engine.sampling.grammar.guidance.probe", argument]
        try:
            process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:  # no room for another process
            cause = f"{error.strerror}, {describe_process_limit()}" if error.errno == EAGAIN else error.strerror
            logger.error("cannot start the process that compiles grammars: %s", cause)
            raise GrammarCompilerError(f"cannot start the process that compiles grammars: {cause}") from error
        reply = _reply(process, START_TIMEOUT)
        if isinstance(reply, Ready):
            return process
        self._process = None
        _reap(process)
        if self._closed:
            raise _shut_down()
        if isinstance(reply, Unusable):
            raise InvalidRequestError(reply.error, param="grammar")
        logger.error("the process that compiles grammars did not start, exit status %s", process.returncode)
        raise GrammarCompilerError("the process that compiles grammars did not start")

    def _ask(self, process: "subprocess.Popen[bytes]", spec: GrammarSpec) -> ProbeReply | None:
        """None when the process died over it, or was killed for taking too long."""
        assert process.stdin is not None, "the process was started with a pipe"
        try:
            write_message(process.stdin, ProbeJob(spec=spec))
        except OSError:
            reply = None
        else:
            reply = _reply(process, WALL_FACTOR * self.setup.cpu_seconds)
        if reply is None:
            _reap(process)
        return reply

    def _cause_of_death(self, process: "subprocess.Popen[bytes]", spec: GrammarSpec) -> EngineError:
        if self._closed:
            return _shut_down()
        if process.returncode in {-signal.SIGPROF, -signal.SIGKILL}:
            return InvalidRequestError(
                f"this {spec.kind} grammar took more than {self.setup.cpu_seconds:g} s to compile, the limit "
                "(--grammar-compile-timeout); make it simpler",
                param="grammar",
            )
        return InvalidRequestError(
            f"this {spec.kind} grammar needs more than {self.setup.memory_bytes >> 20} MiB to compile, or is nested "
            "too deeply; make it simpler",
            param="grammar",
        )


def _reply(process: "subprocess.Popen[bytes]", timeout: float) -> ProbeReply | None:
    """The next reply; None when the process ended or did not reply in time."""
    assert process.stdout is not None, "the process was started with a pipe"
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN | select.POLLHUP)
    if not poller.poll(timeout * 1000):
        return None
    body = read_message(process.stdout)
    return None if body is None else msgspec.msgpack.decode(body, type=ProbeReply)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """End a process, if it has not ended by itself, take its exit status and close the pipes. Idempotent."""
    if process.poll() is None:
        process.kill()
    process.wait(STOP_TIMEOUT)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "the process was started with pipes"
        with suppress(BrokenPipeError):  # what is left of a job that was not written in full
            pipe.close()


def _shut_down() -> GrammarCompilerError:
    return GrammarCompilerError("the grammar compiler is shut down")


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
