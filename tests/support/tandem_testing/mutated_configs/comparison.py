"""A checkpoint read by Tandem and by transformers: equal, refused, or one of the outcomes that must not be."""

import contextlib
import warnings
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config import ModelImpl
from tandem_engine.model.base import CausalLM
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.loader import load_model
from tandem_engine.model.long_context import default_context
from tandem_lab.verify.reference import load_reference
from tandem_testing.dense_attention import DenseAttend, with_states

LENGTHS = (70, 19)
"""Tokens of the prompts: the first is longer than the windows and thresholds of the mutations."""
STEPS = 6
"""Tokens decoded after the first."""
TOLERANCE = 2e-3
"""Norm of the difference of logits, relative to that of the logits."""
MAX_MESSAGE = 2000


class Outcome(StrEnum):
    EQUAL = "equal"
    REFUSED = "refused"
    NO_REFERENCE = "no reference"
    """transformers cannot load or run it."""
    DIFFERENT = "different"
    CRASHED = "crashed"
    """Another exception than a `CheckpointError` or a `ConfigError`, or one of several lines."""

    @property
    def is_fault(self) -> bool:
        return self in (Outcome.DIFFERENT, Outcome.CRASHED)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    outcome: Outcome
    detail: str = ""
    impl: ModelImpl | None = None
    """The library that computed it."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    logits: tuple[Tensor, ...]
    """Of each prompt, [T, vocab]."""
    tokens: tuple[int, ...]
    """Decoded after the first prompt."""


def compare(directory: Path, *, impl: ModelImpl = ModelImpl.AUTO, worth: Path | None = None) -> Comparison:
    """Load the checkpoint in `directory` both ways and compare logits of whole prompts and tokens of a decode.

    `worth`: another one, which transformers is to load.
    """
    try:
        with _quiet():
            config = read_model_config(directory, impl=impl)
            context = default_context(config, config.max_position)
            model = load_model(directory, config, torch.float32, context_length=context, progress=False)
    except (CheckpointError, ConfigError) as error:
        message = str(error)
        sound = "\n" not in message and len(message) <= MAX_MESSAGE and "Traceback" not in message
        return Comparison(outcome=Outcome.REFUSED if sound else Outcome.CRASHED, detail=message)
    except Exception as error:  # noqa: BLE001 - any other exception is what is looked for
        return Comparison(outcome=Outcome.CRASHED, detail=repr(error))
    lengths = [length for length in LENGTHS if length + STEPS < context] or [context - STEPS]
    if lengths[0] < 1:
        return Comparison(outcome=Outcome.NO_REFERENCE, detail=f"a context of {context}")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(config.vocab_size, (length,), generator=generator) for length in lengths]
    try:
        with _quiet():
            theirs = _theirs(worth or directory, prompts)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return Comparison(outcome=Outcome.NO_REFERENCE, detail=repr(error)[:200], impl=model.config.impl)
    try:
        difference = _difference(_ours(model, prompts), theirs)
    except Exception as error:  # noqa: BLE001 - any exception is what is looked for
        return Comparison(outcome=Outcome.CRASHED, detail=repr(error), impl=model.config.impl)
    outcome = Outcome.EQUAL if difference is None else Outcome.DIFFERENT
    return Comparison(outcome=outcome, detail=difference or "", impl=model.config.impl)


@torch.inference_mode()
def _ours(model: CausalLM, prompts: list[Tensor]) -> Computed:
    """All prompts in one step, then the first one decoded."""
    attend = DenseAttend(specs=model.attention)
    parts = _extend(model, attend, prompts, [0] * len(prompts))
    tokens, step, start = [], parts[0][-1].argmax(keepdim=True), len(prompts[0])
    for _ in range(STEPS):
        tokens.append(int(step))
        rest = [torch.empty(0, dtype=torch.int64)] * (len(prompts) - 1)
        logits = _extend(model, attend, [step, *rest], [start] + [0] * len(rest))[0]
        step, start = logits[-1].argmax(keepdim=True), start + 1
    return Computed(logits=tuple(parts), tokens=tuple(tokens))


def _extend(model: CausalLM, attend: DenseAttend, ids: list[Tensor], starts: list[int]) -> list[Tensor]:
    busy = [index for index, part in enumerate(ids) if len(part)]
    attend.extend_lens = [len(ids[index]) for index in busy]
    positions = torch.cat([torch.arange(starts[index], starts[index] + len(ids[index])) for index in busy])
    flat = torch.cat([ids[index] for index in busy])
    hidden = model.forward(flat, positions, with_states(attend, model), torch.arange(len(flat)))
    return list(model.logits(hidden).split(attend.extend_lens))


@torch.inference_mode()
def _theirs(directory: Path, prompts: list[Tensor]) -> Computed:
    """By transformers, which gets tokens and nothing else."""
    model = load_reference(directory)
    logits = tuple(model(prompt[None], use_cache=False).logits[0].float() for prompt in prompts)
    out = model.generate(
        prompts[0][None], do_sample=False, num_beams=1, max_new_tokens=STEPS, min_new_tokens=STEPS, eos_token_id=None
    )
    return Computed(logits=logits, tokens=tuple(int(token) for token in out[0, len(prompts[0]) :]))


def _difference(ours: Computed, theirs: Computed) -> str | None:
    for index, (mine, reference) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        if not bool(reference.isfinite().all()):
            continue
        error = float((mine - reference).norm() / reference.norm().clamp_min(1e-9))
        if not error <= TOLERANCE:
            return f"logits of prompt {index} are off by {error:.2g}"
    if ours.tokens != theirs.tokens and bool(theirs.logits[0].isfinite().all()):
        return f"decoded {ours.tokens}, transformers {theirs.tokens}"
    return None


@contextlib.contextmanager
def _quiet():
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
