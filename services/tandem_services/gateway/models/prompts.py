"""Converts text and messages to token ids and back; rejects prompts that cannot fit.

`logit_biases`, `allowed_ids` and `bad_word_ids` convert request fields that name tokens. They are pure, and bounded
before anything is encoded. A bad word is encoded as at the beginning of a text and as after a space. vLLM drops the
second form if its number of tokens differs from the first; here it is dropped only if it ends in the first, which then
forbids both.

`TokenizerThreads` keeps this work off the event loop, except for a few brief texts in each of its iterations:

    call ─▶ queue of short or of long work ─▶ thread ─▶ all results so far, in one wake-up of the loop

Waking a thread and the loop costs about as much as encoding a short text. An awake thread therefore takes all queued
work and returns its results together, so the cost per call falls with load. Long work has its own threads, so that no
short text waits for it. The queue is bounded: `run` rejects work beyond it. Work is skipped if its client has
disconnected or its deadline has passed.

Brief texts beyond the time of an iteration wait for the next ones, in the order of their arrival: of a burst, the first
requests are with their workers while the last still wait.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from tandem_engine.base.logs import quoted
from tandem_engine.base.thread_pools import started_pool
from tandem_engine.messages.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer, Truncation
from tandem_services.common.errors import bad_request, unavailable
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.limits import (
    BRIEF_TEXT_CHARACTERS,
    BRIEF_TEXTS_S,
    MAX_BAD_WORD_CHARACTERS,
    MAX_TOKENIZER_CHARACTERS,
    MAX_TOKENIZER_JOBS,
    SHORT_TEXT_CHARACTERS,
    check_text_length,
)
from tandem_services.gateway.models.model import ServedModel

MAX_WORDS = MAX_BAD_WORDS // 2
"""Each may take two token sequences."""

MAX_NAMED_KEYS = 8
"""Of a bad logit_bias, in the answer: others are counted."""


def logit_biases(biases: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's object of token id → bias. Raises `ApiError` 400 naming all keys that are no token ids."""
    if not biases:
        return ()
    if len(biases) > MAX_LOGIT_BIASES:
        raise bad_request(f"logit_bias takes at most {MAX_LOGIT_BIASES} entries, got {len(biases)}", "logit_bias")
    strange = [key for key in biases if not _is_token_id(key)]
    if strange:
        names = ", ".join(map(quoted, strange[:MAX_NAMED_KEYS]))
        more = f" and {len(strange) - MAX_NAMED_KEYS} more" if len(strange) > MAX_NAMED_KEYS else ""
        raise bad_request(f"logit_bias: not a token id: {names}{more}", "logit_bias")
    for key in biases:
        if not 0 <= int(key) < vocab_size:
            raise bad_request(
                f"logit_bias: token id {quoted(key)} is out of vocabulary, which has {vocab_size} tokens", "logit_bias"
            )
    return tuple((int(key), bias) for key, bias in biases.items())


def allowed_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    """Raises `ApiError` 400 for an empty list: no token could be generated."""
    if ids is not None and not ids:
        raise bad_request("allowed_token_ids must have at least one token id", "allowed_token_ids")
    return tuple(ids or ())


def named_ids(ids: Sequence[int] | None, *, logprobs: int | None) -> tuple[int, ...]:
    """`logprob_token_ids`. Raises `ApiError` 400 for an empty list, and without logprobs."""
    if ids is None:
        return ()
    if not ids:
        raise bad_request("logprob_token_ids must have at least one token id", "logprob_token_ids")
    if logprobs is None:
        raise bad_request("logprob_token_ids is only allowed with logprobs: ask for them too", "logprob_token_ids")
    return tuple(ids)


def bad_word_ids(words: Sequence[str] | None, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of `words`. Raises `ApiError` 400 naming a word that is empty or too long."""
    if not words:
        return ()
    if len(words) > MAX_WORDS:
        raise bad_request(f"bad_words takes at most {MAX_WORDS} words, got {len(words)}", "bad_words")
    spellings = (ids for position, word in enumerate(words) for ids in _spellings(word, position, tokenizer))
    return tuple(dict.fromkeys(spellings))


def _is_token_id(key: str) -> bool:
    digits = key.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) <= 18


def _spellings(word: str, position: int, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    bare = word.lstrip()
    if not bare or len(word) > MAX_BAD_WORD_CHARACTERS:
        raise bad_request(
            f"bad_words[{position}] must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, one of them no space, "
            f"got {len(word)}",
            "bad_words",
        )
    first, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}"))
    for ids in (first, spaced):
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise bad_request(
                f"bad_words[{position}] has {len(ids)} tokens, the limit is {MAX_BAD_WORD_TOKENS}", "bad_words"
            )
    return [first] if spaced[-len(first) :] == first else [first, spaced]


logger = logging.getLogger(__name__)

MAX_AT_ONCE = 16
"""Short pieces of work that are answered together: about a millisecond's worth of the usual ones."""

RETRY_S = 1.0
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    answer: "asyncio.Future[Any]"
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        if self.answer.cancelled():
            return
        try:
            self.value = self.work()
        except Exception as error:  # noqa: BLE001  # raised where the result is awaited
            self.error = error
        except BaseException as panic:  # noqa: BLE001  # of a tokenizer in Rust: the thread must continue
            self.error = _unconverted(panic)
            self.error.__cause__ = panic

    def deliver(self) -> None:
        """On the loop."""
        if self.answer.done():
            return
        if self.error is None:
            self.answer.set_result(self.value)
        else:
            self.answer.set_exception(self.error)


def _unconverted(panic: BaseException) -> RuntimeError:
    """For a panic of a tokenizer, which is no `Exception`."""
    return RuntimeError(f"text could not be converted: {type(panic).__name__}")


class _Line:
    """Work that waits for one of `threads`, oldest first; each takes at most `at_once`."""

    def __init__(self, threads: int, *, at_once: int, name: str) -> None:
        self._executor = started_pool(threads, name=name)
        self._threads = threads
        self._at_once = at_once
        self._jobs: deque[_Job] = deque()
        self._awake = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(work, answer)
        self._put(job)
        try:
            return await answer
        except asyncio.CancelledError:
            self._drop(job)
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _put(self, job: _Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._awake == self._threads:
                return
            self._awake += 1
        self._executor.submit(self._work)

    def _drop(self, job: _Job) -> None:
        # Canceled work would otherwise keep its text alive until a thread reaches it.
        with self._lock, suppress(ValueError):  # a thread has it already
            self._jobs.remove(job)

    def _work(self) -> None:
        while jobs := self._take():
            for job in jobs:
                job.run()
            loop = jobs[0].answer.get_loop()
            if loop.is_closed():
                continue  # canceled
            loop.call_soon_threadsafe(_deliver, jobs)

    def _take(self) -> list[_Job]:
        with self._lock:
            jobs = [self._jobs.popleft() for _ in range(min(len(self._jobs), self._at_once))]
            if not jobs:
                self._awake -= 1
            return jobs


@dataclass(kw_only=True)
class TokenizerThreads:
    """Those of one event loop: one for short work, `long_threads` for long. Brief work needs none of them."""

    long_threads: int
    most_jobs: int = MAX_TOKENIZER_JOBS
    most_characters: int = MAX_TOKENIZER_CHARACTERS
    jobs: int = field(default=0, init=False)
    """Waiting and running, with their `characters`."""
    characters: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._brief_s = 0.0
        """Of brief work in this iteration of the event loop."""
        self._brief_mean_s = BRIEF_TEXTS_S
        """Of one, lately."""
        self._brief: deque[asyncio.Future[None]] = deque()
        """Turns of brief work that waits for a later iteration, oldest first."""
        self._iteration_due = False
        self._short = _Line(1, at_once=MAX_AT_ONCE, name="tokenizer")
        self._long = _Line(self.long_threads, at_once=1, name="tokenizer-long")

    async def run(self, work: Callable[[], T], *, characters: int, refusable: bool = True, brief: bool = False) -> T:
        """What `work` returns, or raises. `characters`: about how many it reads. `brief`: a few take it no time.

        Raises `ApiError` 503 when too much waits already and it is `refusable`: not the last step of what others have
        computed. Cancelled, it gives up its place.
        """
        is_brief = brief and characters <= BRIEF_TEXT_CHARACTERS
        if is_brief and not self._brief and self._brief_s < BRIEF_TEXTS_S:
            return self._run_here(work)
        # A single text is accepted whatever its length: the caller limits it.
        full = self.jobs >= self.most_jobs or self.characters + characters > self.most_characters
        if refusable and self.jobs and full:
            raise unavailable("Too many texts wait for the tokenizer. Try again later.", retry_after=RETRY_S)
        self.jobs += 1
        self.characters += characters
        try:
            if is_brief:
                await self._turn()
                return self._run_here(work)
            line = self._short if characters <= SHORT_TEXT_CHARACTERS else self._long
            return await line.run(work)
        finally:
            self.jobs -= 1
            self.characters -= characters

    def _run_here(self, work: Callable[[], T]) -> T:
        self._note_iteration()
        began = time.perf_counter()
        try:
            return work()
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:
            raise _unconverted(panic) from panic
        finally:
            took_s = time.perf_counter() - began
            self._brief_s += took_s
            self._brief_mean_s += (took_s - self._brief_mean_s) / MAX_AT_ONCE

    async def _turn(self) -> None:
        """Until brief work may run. A thread would wait for the interpreter of a busy loop, once or twice for each."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._brief.append(turn)
        self._note_iteration()
        await turn

    def _note_iteration(self) -> None:
        if not self._iteration_due:
            self._iteration_due = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        """A boundary, which the event loop calls: whatever happens, what still waits has a turn in the next one."""
        self._iteration_due, self._brief_s = False, 0.0
        try:
            self._give_turns()
        except Exception:
            logger.exception("texts that wait could not be given their turns")
        if self._brief:
            self._iteration_due = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _give_turns(self) -> None:
        """To brief work that waits, as much of it as takes the time; the loop then serves others."""
        most = int(BRIEF_TEXTS_S / max(self._brief_mean_s, BRIEF_TEXTS_S / MAX_AT_ONCE))
        for _ in range(min(len(self._brief), max(1, most))):
            turn = self._brief.popleft()
            if not turn.done():
                turn.set_result(None)

    def close(self) -> None:
        """Start no further work; no caller waits for it."""
        self._short.close()
        self._long.close()


def _deliver(jobs: list[_Job]) -> None:
    """Whatever happens to one of them, all others get their results, and none waits for nothing."""
    for job in jobs:
        try:
            job.deliver()
        except Exception as error:  # noqa: BLE001  # raised where the result is awaited
            if not job.answer.done():
                job.answer.set_exception(error)


NO_WORKERS_RETRY_S = 2.0


@dataclass(kw_only=True, slots=True)
class PromptEncoder:
    """Turns what clients send into ids, and ids that they send into text. Raises `ApiError` 503 when too much of it
    waits for `threads`."""

    model: ServedModel
    threads: TokenizerThreads
    parse_special_tokens: bool = True
    """Special tokens in text prompts become control tokens, where key and request allow it."""

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.model.tokenizer

    def context_length(self) -> int:
        """Raises `ApiError` 503 until there has been a worker: the answer is unknown."""
        length = self.model.last_context_length
        if length is None:
            raise unavailable("No worker can take the request now. Try again later.", retry_after=NO_WORKERS_RETRY_S)
        return length

    def parses_special_tokens(self, asked: bool | None, caller: Caller) -> bool:
        """Whether special tokens in the text prompts of a request become control tokens. `asked`: the request's field.

        Raises `ApiError` 400 when it requests what gateway or key forbid.
        """
        allowed = self.parse_special_tokens and caller.tenant.parse_special_tokens
        if asked and not allowed:
            raise bad_request(
                "parse_special_tokens: special tokens are plain text in text prompts here: leave it out, or send token "
                "ids",
                "parse_special_tokens",
            )
        return allowed if asked is None else asked

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        parse_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        [ids] = await self.encode_all(
            [text],
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
            truncation=truncation,
            param="prompt",
        )
        return ids

    async def encode_middle(
        self, prefix: str, suffix: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> tuple[int, ...]:
        """A prompt that requests the text between both. Raises `InvalidRequestError` 400 for models that cannot."""
        characters = len(prefix) + len(suffix)
        check_text_length(characters, self.model.longest_token, self.context_length(), "prompt")
        work = partial(
            self.tokenizer.encode_middle,
            prefix,
            suffix,
            add_special_tokens=add_special_tokens,
            parse_special_tokens=parse_special_tokens,
        )
        return tuple(await self.threads.run(work, characters=characters))

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        param: str,
        parse_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> list[tuple[int, ...]]:
        """Of each text its ids: in one piece of work, however many there are. `param`: the field they are from."""
        for text in texts if truncation is None else ():
            check_text_length(len(text), self.model.longest_token, self.context_length(), param)

        def work() -> list[tuple[int, ...]]:
            encode = partial(
                self.tokenizer.encode,
                add_special_tokens=add_special_tokens,
                parse_special_tokens=parse_special_tokens,
                truncation=truncation,
            )
            return [tuple(encode(text)) for text in texts]

        return await self.threads.run(work, characters=sum(map(len, texts)), brief=True)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
        truncation: Truncation | None = None,
    ) -> tuple[int, ...]:
        work = partial(
            self.tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            add_special_tokens=add_special_tokens,
            continue_final=continue_final,
            tools=tools,
            variables=variables,
        )
        characters = self._characters(messages, tools, variables, may_be_cut=truncation is not None)
        ids = await self.threads.run(work, characters=characters, brief=not (tools or variables))
        return tuple(ids) if truncation is None else truncation.of(ids)

    async def encode_chat_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        last_token: int | None,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """New messages of a conversation whose beginning, up to `last_token`, a worker keeps."""
        work = partial(
            self.tokenizer.encode_chat_turn,
            messages,
            last_token=last_token,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )
        characters = self._characters(messages, tools, variables)
        return tuple(await self.threads.run(work, characters=characters, brief=not (tools or variables)))

    async def bad_words(self, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """Token sequences of `words`: see `bad_word_ids`."""
        if not words:
            return ()
        work = partial(bad_word_ids, words, self.tokenizer)
        return await self.threads.run(work, characters=sum(map(len, words)))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids of the vocabulary."""
        work = partial(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self.threads.run(work, characters=len(token_ids))

    async def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token alone; U+FFFD for bytes that are not UTF-8."""

        def work() -> list[str]:
            return [self.tokenizer.vocabulary.bytes_of(token).decode("utf-8", "replace") for token in token_ids]

        return await self.threads.run(work, characters=len(token_ids))

    def _characters(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        may_be_cut: bool = False,
    ) -> int:
        """Raises `ApiError` 400 for more than can be answered. Tools and variables count for the time they take,
        not for their length: a template may leave out parts of them."""
        characters = sum(len(message["content"]) for message in messages)
        if not may_be_cut:
            check_text_length(characters, self.model.longest_token, self.context_length(), "messages")
        beside = [value for value in (tools, variables) if value]
        return characters + (len(msgspec.json.encode(beside)) if beside else 0)
