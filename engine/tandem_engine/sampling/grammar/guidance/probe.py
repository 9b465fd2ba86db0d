"""The probe process: compiles a grammar within limits, and is killed if the grammar exceeds them.

llguidance bounds most of what a grammar can require of it, but not all: a `multipleOf` of nine digits, or an
intersection of thirty regexes, compiles for minutes and takes gigabytes, and a thread cannot be stopped. So a grammar
is compiled here first, within limits that the kernel enforces, and by the engine only if that succeeded.

    stdin    `ProbeJob`s, each preceded by its length in four bytes
    stdout   `Ready` or `Unusable` once, then one `Compilable` or `Refused` per job

    CPU time   SIGPROF after `cpu_seconds` of a job
    memory     allocations beyond `memory_bytes` more than at the start fail
    depth      a stack of `STACK_BYTES`: the engine's threads have more

A grammar that hits a limit ends the process, and the exit shows which limit it was.
"""

import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.base.linux import die_with_parent
from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.sampling.grammar.guidance.translate import GuidanceVocabulary, refusal, translate

LIMITS = LLParserLimits(
    # About 20 MiB; the states of a grammar are shared by all requests that follow it.
    max_lexer_states=10_000,
    # Errors sent to clients must not quote a parser's state.
    verbose_errors=False,
)
"""The rest are llguidance's own: they bound one mask to some 25 ms, after which the output ends with an error."""

SILENT = 0


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile. Raises nothing: see `LLMatcher.get_error`."""
    return LLMatcher(tokenizer, grammar, log_level=SILENT, limits=LIMITS)


STACK_BYTES = 2 << 20

NICENESS = 5
"""Serving goes first."""

LENGTH = struct.Struct("<I")


class ProbeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """On the command line, as JSON."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    cpu_seconds: float
    memory_bytes: int


class ProbeJob(msgspec.Struct, frozen=True, kw_only=True):
    spec: GrammarSpec


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The tokenizer is built."""


class Unusable(msgspec.Struct, frozen=True, kw_only=True, tag="unusable"):
    """No grammar can be compiled for this model."""

    error: str


class Compilable(msgspec.Struct, frozen=True, kw_only=True, tag="compilable"):
    """What to give to `LLMatcher`."""

    grammar: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    error: str


ProbeReply = Ready | Unusable | Compilable | Refused


def write_message(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Send one message. Raises `OSError` when the other end is gone."""
    body = msgspec.msgpack.encode(message)
    pipe.write(LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> bytes | None:
    """One encoded message; None at the end of the pipe."""
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = pipe.read(length)
    return body if len(body) == length else None


def main(argv: list[str]) -> None:
    """Serve until stdin ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = msgspec.json.decode(argv[0], type=ProbeSetup)
    vocabulary = GuidanceVocabulary(
        tokenizer_file=Path(setup.tokenizer_file), vocab_size=setup.vocab_size, eos_token_ids=setup.eos_token_ids
    )
    jobs, replies = sys.stdin.buffer, sys.stdout.buffer
    try:
        tokenizer = vocabulary.tokenizer()
    except InvalidRequestError as error:
        write_message(replies, Unusable(error=str(error)))
        return
    _set_limits(setup.memory_bytes)
    write_message(replies, Ready())
    while (job := read_message(jobs)) is not None:
        spec = msgspec.msgpack.decode(job, type=ProbeJob).spec
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_seconds)
        reply = probe(spec, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_message(replies, reply)


def probe(spec: GrammarSpec, tokenizer: LLTokenizer) -> Compilable | Refused:
    """Compile `spec` and ask for its first mask."""
    try:
        grammar = translate(spec, tokenizer)
        matcher = new_matcher(tokenizer, grammar)
        if not matcher.is_error():
            first = matcher.compute_bitmask()
        if matcher.is_error():
            raise refusal(spec.kind, _explain(matcher.get_error()))
        if not any(first) or (_only_eos(first, tokenizer) and not matcher.is_accepting()):
            raise refusal(spec.kind, "nothing matches it")
    except InvalidRequestError as error:
        return Refused(error=str(error))
    return Compilable(grammar=grammar)


def _explain(error: str) -> str:
    if "NoExtension" in error:
        return "nothing matches it"
    return error


def _only_eos(mask: bytes, tokenizer: LLTokenizer) -> bool:
    allowed = int.from_bytes(mask, "little")
    return not allowed & ~sum(1 << token for token in tokenizer.eos_tokens)


def _set_limits(memory_bytes: int) -> None:
    os.nice(NICENESS)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # From here on clients determine the output on stderr.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
