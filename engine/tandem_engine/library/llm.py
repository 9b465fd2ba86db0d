"""`LLM`: many prompts in, all outputs out, in this process and on the caller's thread.

    with LLM("models/tandem-mini") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

Between construction and `close` the calling thread is the engine's scheduler thread: call everything from it, and
expect torch in it to compute with one thread, because the engine's forwards have all the others.

Engine options are keywords with the names of the command-line flags (`config_from_options`):

    LLM(path, page_size=32, mem_fraction_static=0.5, disable_radix_cache=True)
    tandem worker --page-size 32 --mem-fraction-static 0.5 --disable-radix-cache
"""

import argparse
import difflib
import itertools
import re
import secrets
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from tqdm import tqdm

from tandem_engine.base.errors import ConfigError, InvalidRequestError, RankLostError, SessionError
from tandem_engine.config import EngineConfig, Role
from tandem_engine.config.flags import about_other_engine, add_engine_flags, engine_config
from tandem_engine.engine.launch import ProgressOption, launched_engine
from tandem_engine.executor.profiler import MAX_SECONDS, MAX_STEPS, StepProfiler
from tandem_engine.library.adapters import LoRARequest, adapter_config
from tandem_engine.library.answer import Pending, make_answer, make_embedding_answer, serving_of
from tandem_engine.library.model_source import with_folder
from tandem_engine.library.outputs import EmbeddingRequestOutput, RequestOutput
from tandem_engine.library.prompts import (
    Conversation,
    Encoded,
    Prompt,
    Session,
    encode_conversations,
    encode_prompts,
    params_for,
)
from tandem_engine.library.sampling_params import SamplingParams
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import PoolingParams
from tandem_engine.messages.stats import EngineStats
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer


class _OptionParser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def config_from_options(model: str | Path, options: dict[str, object]) -> EngineConfig:
    """The configuration of an engine that serves `model`.

    Raises `ConfigError` for an option that does not exist, naming the nearest, and for a value that its flag
    would not take.
    """
    parser = _OptionParser(add_help=False, allow_abbrev=False)
    add_engine_flags(parser)
    # Names and aliases, such as vLLM's max_model_len.
    actions = {
        flag.lstrip("-").replace("-", "_"): action for action in parser._actions for flag in action.option_strings
    }
    argv: list[str] = []
    for name, value in options.items():
        if name not in actions:
            raise ConfigError(f"there is no engine option {name!r}{_about(name, [*actions])}")
        argv += _arguments(actions[name], value)
    args = parser.parse_args(argv)
    # It has no peers: nothing that a transfer could not do stands in its way.
    args.model, args.role, args.transport = str(model), Role.BOTH.value, "none"
    return engine_config(args)


def _arguments(action: argparse.Action, value: object) -> list[str]:
    flag = action.option_strings[0]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{action.dest} is a switch and takes True or False, got {value!r}")
        return [flag] if value else []
    if value is None:
        return []
    if isinstance(value, bool):
        raise ConfigError(f"{action.dest} takes a value, got {value}")
    if action.nargs in ("+", "*") and isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    # One word, so that a value may begin with a dash.
    return [f"{flag}={value}"]


_FLAG = re.compile(r"--[a-z0-9-]+")


def _about(name: str, known: list[str]) -> str:
    """What another engine's option is here, else the nearest of `known`."""
    theirs = about_other_engine(_flag(name), {_flag(option) for option in known})
    if theirs:
        return f": {_FLAG.sub(lambda flag: flag[0][2:].replace('-', '_'), theirs)}"
    return _nearest(name, known) if theirs is None else f"; there are {', '.join(sorted(known))}"


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"


RELOAD_POLL_S = 0.01


class LLM:
    """A model that answers lists of prompts. Not thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        progress: ProgressOption = True,
        **options: object,
    ) -> None:
        """Load the checkpoint in the folder `model`, or org/name[@revision] of the Hugging Face hub, and LoRA adapters,
        folders of PEFT by name.

        `options` are the engine's flags as keywords: page_size, num_pages, mem_fraction_static, dtype, threads,
        disable_radix_cache, …; `tandem worker --help-all` explains them. `max_lora_rank` (64) bounds the ranks of
        adapters. `progress` shows a bar while weights are downloaded and loaded; a function is called with each
        `Progress` of loading instead: phase, done, total, unit.

        Raises:
            ConfigError: an option does not exist or cannot work, or the model cannot be fetched.
            CheckpointError: the folder holds no checkpoint that can be served, or an adapter does not fit it.
        """
        given = adapter_config(adapters, options)
        config = with_folder(config_from_options(model, options), model, progress=progress is True)
        self._config = replace(config, adapters=given)
        self._caller_threads = torch.get_num_threads()
        self._growing: dict[str, Pending] = {}
        """By the rid of every choice that the engine has."""
        self._completed = 0
        """Answers completed since the last update of the progress bar."""
        self._open = ExitStack()
        self._engine = self._open.enter_context(launched_engine(self._config, progress=progress, sink=self._take))
        self._serving = serving_of(self._engine, self._config)
        self._numbers = itertools.count()
        self._profiler: StepProfiler | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        session: Session | Sequence[Session] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
        parse_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """One `RequestOutput` per prompt, in order, when all have ended.

        A prompt is text, a list of token ids, or a dict with either, as vLLM takes it. A request that fails has
        `finish_reason` "error" and the reason in `error`; the other requests continue.

        With a `session`, or one for each prompt, a prompt is only the new turn of its conversation: it is appended
        to the turns before. Text gets no special tokens then, such as BOS.

        `lora_request` names the adapter that computes all prompts, or one for each, None for the model alone.

        Special tokens in a text become control tokens, as in vLLM. Without `parse_special_tokens` they are plain text.

        Raises:
            InvalidRequestError: a prompt or its parameters can never be served. Nothing was generated.
            SessionLostError: the engine forgot the session. Nothing was generated.
            RankLostError: another process of a `tensor_parallel_size` above 1 has ended; this `LLM` is closed.
        """
        encoded = encode_prompts(prompts, self._serving.text, session, parse_special_tokens=parse_special_tokens)
        encoded = self._serving.adapters.given(encoded, lora_request)
        return self._generate(encoded, params_for(sampling_params, len(encoded)), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or a list of them, through the model's chat template."""
        encoded = encode_conversations(
            messages,
            self._serving.text,
            add_generation_prompt=add_generation_prompt,
            template_variables=chat_template_kwargs,
        )
        encoded = self._serving.adapters.given(encoded, lora_request)
        return self._generate(encoded, params_for(sampling_params, len(encoded)), use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector per prompt, in order: its hidden states after the final norm, pooled.

        Raises:
            InvalidRequestError: a prompt or the parameters can never be served. Nothing was computed.
            RequestFailedError: the engine gave a prompt up.
        """
        params = pooling_params or PoolingParams()
        encoded = self._serving.adapters.given(encode_prompts(prompts, self._serving.text), lora_request)
        answers = [make_embedding_answer(str(next(self._numbers)), prompt, params) for prompt in encoded]
        self._run(answers, use_tqdm=use_tqdm)
        return [answer.output() for answer in answers]

    def open_session(self, session_id: str | None = None) -> Session:
        """A conversation of which each `generate` brings only the new turn. None makes an id up."""
        return Session(id=session_id or secrets.token_hex(16), forget=self._engine.close_session)

    def get_tokenizer(self) -> TextTokenizer | None:
        """Of the checkpoint; None when it has none."""
        return self._serving.text

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; returns the pages freed."""
        return self._engine.flush_cache()

    def reload_weights(self, path: str | Path | None = None) -> None:
        """Replace the weights by those in `path`, or read the served folder again; prefixes are forgotten.

        Raises `CheckpointError` or `ConfigError`, and keeps the old ones, when they cannot serve here.
        """
        reload = self._engine.reload(None if path is None else str(path))
        while not reload.done():
            if not self._engine.step():
                wait([reload], timeout=RELOAD_POLL_S)
        reload.result()

    def start_profile(self, folder: str | Path) -> Path:
        """Record the steps to come, until `stop_profile`, to a Chrome trace in `folder`; returns its file."""
        self._profiler = self._engine.profiler(Path(folder))
        launched = self._engine.scheduler.launched
        return self._profiler.start(launched=launched, steps=MAX_STEPS, seconds=MAX_SECONDS)

    def stop_profile(self) -> Path:
        """Write the trace and return its file. Raises `BusyError` when none is recorded."""
        profiler = self._profiler or self._engine.profiler(None)
        return profiler.stop()

    def stats(self) -> EngineStats:
        """The engine's numbers."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop computing and give the calling thread back. Idempotent."""
        self._open.close()
        torch.set_num_threads(self._caller_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self, prompts: Sequence[Encoded], params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        answers = [
            make_answer(str(next(self._numbers)), prompt, each, self._serving)
            for prompt, each in zip(prompts, params, strict=True)
        ]
        self._run(answers, use_tqdm=use_tqdm)
        return [answer.output() for answer in answers]

    def _run(self, answers: Sequence[Pending], *, use_tqdm: bool) -> None:
        """Until all have finished."""
        self._refuse_impossible(answers)
        try:
            with tqdm(
                total=len(answers), desc="prompts", file=sys.stderr, dynamic_ncols=True, disable=not use_tqdm
            ) as bar:
                self._drive(answers, bar)
        except RankLostError as error:
            # Nothing can follow, not even an abort; and closing finds out which rank was lost, and how.
            self._growing.clear()
            self._open.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._drop_unfinished()

    def _refuse_impossible(self, answers: Sequence[Pending]) -> None:
        """Before anything runs: one bad prompt in thousands must not be found out at the end."""
        for position, answer in enumerate(answers):
            try:
                self._engine.check(answer.requests[0])
            except SessionError:
                raise
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {position}: {error}", param=error.param) from error

    def _drive(self, answers: Sequence[Pending], bar: "tqdm[Any]") -> None:
        """Feed the queue, which is bounded, and step until every answer is complete."""
        waiting = deque(answers)
        while waiting or self._growing:
            while waiting and len(waiting[0].requests) <= self._engine.queue_room:
                self._ask(waiting.popleft())
            if not self._engine.step() and not self._growing:
                raise ConfigError(
                    f"one prompt requires {len(waiting[0].requests)} outputs, more than max_queued_requests="
                    f"{self._engine.scheduler_config.max_queued_requests}: raise it, or lower n"
                )
            if self._profiler is not None:
                self._profiler.poll(self._engine.scheduler.launched)
            if self._completed:
                bar.update(self._completed)
                self._completed = 0

    def _ask(self, answer: Pending) -> None:
        for request in answer.requests:
            self._growing[request.rid] = answer
        for request in answer.requests:
            self._engine.add(request)

    def _take(self, client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
        del client  # there is one
        for output in outputs:
            answer = self._growing.get(output.rid)
            if answer is None:
                continue
            answer.take(output)
            if answer.finished:
                self._completed += 1
                for request in answer.requests:
                    del self._growing[request.rid]

    def _drop_unfinished(self) -> None:
        """After an exception, Ctrl-C included, nothing of this call may continue."""
        if not self._growing:
            return
        self._growing.clear()
        self._engine.abort_all()
        while not self._engine.idle:
            self._engine.step()
