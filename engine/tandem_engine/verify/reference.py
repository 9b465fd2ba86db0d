"""What transformers generates: the truth that every path of Tandem must reproduce."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from torch import Tensor

from tandem_engine.messages.grammar import GrammarSpec
from tandem_engine.messages.reasoning import ReasoningBudget
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.sampling.grammar.backend import Matcher
from tandem_engine.verify.edited import Processor, processors_for
from tandem_engine.verify.reasoning import forced_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Tokens that somebody else has chosen."""

    logprobs: tuple[float, ...]
    behind: tuple[float, ...]
    """How much less likely each is than the likeliest at its place, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOutput:
    """Greedy continuation of one prompt, with the raw logprob of each chosen token."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ignore_eos: bool
    edits: SamplingParams | None = None
    """How logits were edited before each token was chosen."""
    prompt_logprobs: tuple[float, ...] = ()
    """Of prompt tokens 1, 2, …, when the edits ask for them."""
    grammar: GrammarSpec | None = None
    reasoning_budget: ReasoningBudget | None = None


class TransformersReference:
    """`AutoModelForCausalLM`, in float32 unless told otherwise, eager attention, one prompt at a time."""

    def __init__(
        self, model_path: str, *, weights: torch.dtype = torch.float32, computes: torch.dtype = torch.float32
    ) -> None:
        """`weights`: of the numbers that it computes with; `computes`: of activations."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(weights).to(computes)
        self._cache_field = cache_field(self._model)

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        eos_token_ids: frozenset[int],
        *,
        ignore_eos: bool,
        edits: SamplingParams | None = None,
        matcher: Matcher | None = None,
        budget: ReasoningBudget | None = None,
    ) -> ReferenceOutput:
        """Greedy tokens up to and including the first EOS unless that is ignored, at most `max_tokens`.

        With a `matcher` only among the tokens that it allows, and no further than its grammar. Once a `budget` is
        spent the end of the reasoning. Logprobs are those of all tokens nevertheless.
        """
        processors = [] if edits is None else processors_for(edits, len(prompt))
        ids = torch.tensor([list(prompt)])
        logprobs: list[float] = []
        inputs, cache = ids, None
        while len(logprobs) < max_tokens:
            out = self._model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{self._cache_field: cache})
            raw = out.logits[:, -1].float()
            forced = None if budget is None else forced_token(budget, ids[0, len(prompt) :].tolist())
            chosen = _choose(ids, raw if matcher is None else _allowed(raw, matcher), processors)
            token = chosen if forced is None else forced
            logprobs.append(float(raw.log_softmax(dim=-1)[0, token]))
            inputs, cache = torch.tensor([[token]]), out[self._cache_field]
            ids = torch.cat((ids, inputs), dim=1)
            if token in eos_token_ids and not ignore_eos:
                break
            if matcher is not None and matcher.accept((token,)) and matcher.ended:
                break
        return ReferenceOutput(
            prompt=tuple(prompt),
            token_ids=tuple(ids[0, len(prompt) :].tolist()),
            logprobs=tuple(logprobs),
            ignore_eos=ignore_eos,
            edits=edits,
            reasoning_budget=budget,
            prompt_logprobs=() if edits is None else self._score(prompt),
        )

    @torch.inference_mode()
    def score(self, before: Sequence[int], tokens: Sequence[int]) -> Scored:
        """What it thinks of `tokens`, one after the other, behind `before`."""
        ids = torch.tensor([[*before, *tokens]])
        logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1]
        logprobs = logits.float().log_softmax(dim=-1)
        chosen = logprobs.gather(1, ids[0, len(before) :, None])[:, 0]
        return Scored(logprobs=tuple(chosen.tolist()), behind=tuple((logprobs.max(dim=-1).values - chosen).tolist()))

    def _score(self, prompt: Sequence[int]) -> tuple[float, ...]:
        """Logprobs of all tokens of `prompt` but the first."""
        ids = torch.tensor([list(prompt)])
        logprobs = self._model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)
        return tuple(logprobs[:-1].gather(1, ids[0, 1:, None]).squeeze(1).tolist())


def cache_field(model: torch.nn.Module) -> str:
    """The name that the KV cache has among the arguments and outputs of `model`: transformers 5.24 renamed it."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _choose(ids: Tensor, logits: Tensor, processors: Sequence[Processor]) -> int:
    for process in processors:
        logits = process(ids, logits)
    return int(logits.argmax())


def _allowed(logits: Tensor, matcher: Matcher) -> Tensor:
    """`logits` [1, V] with −inf for every token that `matcher` forbids."""
    bits = np.zeros(-(-logits.shape[1] // 32), dtype=np.int32)
    matcher.fill(bits)
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: logits.shape[1]]
    return logits.masked_fill(torch.from_numpy(allowed == 0), -torch.inf)
