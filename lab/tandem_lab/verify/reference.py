"""What transformers generates: the reference that every path of Tandem must reproduce, and the prompts.

Edited logits: transformers has processors for repetition_penalty, logit_bias and bad_words; presence and frequency
penalties are implemented here in the plainest form. The order is that of `sampling.logits_processor`.

Some requests of the matrix have a reasoning budget or a grammar, next to others without, on every path. The reference
scans its whole output before each token to apply the budget. It applies the same grammar masks in a plain loop: one
prompt, one token, one matcher that is never rolled back, copied or replayed.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import GrammarConfig
from tandem_engine.engine.loaded_model import LoadedModel
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.requests import AdapterRef
from tandem_engine.messages.sampling import ReasoningBudget, SamplingParams
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.config_fields import read_fields
from tandem_engine.model.families.registry import find_family
from tandem_engine.sampling.grammar.backend import CompiledGrammar, Matcher
from tandem_engine.sampling.grammar.guidance.backend import GuidanceBackend
from tandem_engine.sampling.grammar.reasoning import LEAD
from tandem_lab.verify.merged_adapter import merge_adapter

Processor = Callable[[Tensor, Tensor], Tensor]
"""(ids [1, n], logits [1, V]) → logits [1, V], as transformers' `LogitsProcessor`."""


def edits_against(output: Sequence[int]) -> SamplingParams:
    """Edits that turn a plain greedy `output` elsewhere: penalties for its repetitions, beginning and continuation."""
    return SamplingParams(
        max_tokens=1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=tuple({token: 0.75 * (-1) ** i for i, token in enumerate(output[:6])}.items()),
        bad_words=((output[-1],), *dict.fromkeys(pairwise(output[2:]))),
        prompt_logprobs=0,
    )


def processors_for(sampling: SamplingParams, prompt_len: int) -> list[Processor]:
    """The processors that do to logits what `sampling` asks for after a prompt of `prompt_len` tokens."""
    from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    biases = {(token,): bias for token, bias in sampling.logit_bias}
    bad_words = NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words])
    return [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        lambda ids, logits: _penalize_output(sampling, ids[:, prompt_len:], logits),
        SequenceBiasLogitsProcessor(biases),
        lambda ids, logits: bad_words(_without_prompt(ids, prompt_len), logits),
    ]


def _without_prompt(ids: Tensor, prompt_len: int) -> Tensor:
    """The output after one id that no word has: a bad word does not begin in the prompt.

    The id stands for a prompt of any length. Some releases of transformers look at no word that is longer than all
    that came before.
    """
    nothing = torch.full((1, 1), -1, dtype=ids.dtype)
    return torch.cat((nothing, ids[:, prompt_len:]), dim=1)


def _penalize_output(sampling: SamplingParams, output: Tensor, logits: Tensor) -> Tensor:
    counts = torch.bincount(output[0], minlength=logits.shape[1])
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def budgets_against(outputs: Sequence[int], vocab_size: int) -> tuple[ReasoningBudget, ...]:
    """Budgets that change an output which is `outputs` without: of a prompt that has opened the reasoning, and of a
    model that opens it by its first token."""
    begin, end = outputs[:1], (vocab_size - 1, vocab_size - 2)
    return (
        ReasoningBudget(tokens=5, begin=end, end=end, opened=True),
        ReasoningBudget(tokens=3, begin=tuple(begin), end=end[:1]),
    )


def forced_token(budget: ReasoningBudget, outputs: Sequence[int]) -> int | None:
    """The only token that may follow `outputs`, if there is one."""
    start = 0 if budget.opened else _behind(budget.begin, outputs[: LEAD - 1 + len(budget.begin)], 0)
    if start is None or _behind(budget.end, outputs, start) is not None or len(outputs) - start < budget.tokens:
        return None
    begun = max(n for n in range(len(budget.end)) if tuple(outputs[max(start, len(outputs) - n) :]) == budget.end[:n])
    return budget.end[begun]


def _behind(marker: Sequence[int], outputs: Sequence[int], start: int) -> int | None:
    """Where the first `marker` from `start` on ends."""
    places = range(start, len(outputs) - len(marker) + 1)
    return next((at + len(marker) for at in places if tuple(outputs[at : at + len(marker)]) == tuple(marker)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Tokens that another sampler has chosen."""

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
    adapter: AdapterRef | None = None
    """The adapter that computed it; None for the model alone."""


def load_reference(model_path: str | Path) -> Any:
    """The model of transformers in float32, with all of its parts if it takes images too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = _config_of(model_path)
    whole = config.get_text_config(decoder=True) is not config
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = kind.from_pretrained(
        model_path,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        # Products of all experts at once need sizes that are multiples of 16 bytes.
        experts_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    ).eval()
    # Without an image the whole of Llama 4 fails; its text part is a whole model too, with an output matrix.
    text = getattr(model, "language_model", None)
    return model if text is None or text.get_output_embeddings() is None else text


def _config_of(model_path: str | Path) -> Any:
    """Under the `model_type` of transformers, where a family has another one too (Kimi K2 is a deepseek_v3)."""
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = read_fields(open_directory(model_path))
    family = find_family(fields)
    if family is None or fields.values.get("model_type") not in family.other_names:
        return AutoConfig.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    config = CONFIG_MAPPING[family.name].from_pretrained(model_path, local_files_only=True)
    config.model_type = family.name
    return config


COUNTS_FROM_ZERO = ("bamba",)
"""Model types whose forward begins at position 0 in each call, unless it is given positions as by `generate`."""


class TransformersReference:
    """`load_reference`, in float32 by default, eager attention, one prompt at a time."""

    def __init__(
        self, model_path: str, *, weights: torch.dtype = torch.float32, computes: torch.dtype = torch.float32
    ) -> None:
        """`weights`: of the numbers that it computes with; `computes`: of activations."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = load_reference(model_path)
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(weights).to(computes)
        self._cache_field = cache_field(self._model)
        self._gives_positions = self._model.config.model_type in COUNTS_FROM_ZERO

    @contextmanager
    def adapted(self, folder: str | None) -> Iterator[None]:
        """With the adapter in `folder`, if there is one, for as long as the context lasts."""
        before = [(parameter, parameter.data) for parameter in self._model.parameters()]
        if folder is not None:
            merge_adapter(self._model, folder)
        try:
            yield
        finally:
            for parameter, data in before:
                parameter.data = data

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
            options = {self._cache_field: cache, **self._positions(ids.shape[1], inputs.shape[1])}
            out = self._model(input_ids=inputs, use_cache=True, logits_to_keep=1, **options)
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

    def _positions(self, total: int, newest: int) -> dict[str, torch.Tensor]:
        """Of the `newest` of `total` tokens, for a model that does not count them."""
        return {"position_ids": torch.arange(total - newest, total)[None]} if self._gives_positions else {}

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


SCHEMA = """{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 8},
    "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    "wild": {"type": "boolean"}
  },
  "required": ["name", "legs", "wild"],
  "additionalProperties": false
}"""

SPECS = (
    GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=SCHEMA, whitespace_pattern=""),
    GrammarSpec(kind=GrammarKind.REGEX, source=r"[a-z ]{3,30}(!|\\?)"),
    GrammarSpec(kind=GrammarKind.CHOICE, source='["a fox", "a fox and a river", "neither of them"]'),
    GrammarSpec(kind=GrammarKind.JSON_OBJECT),
)

PATIENT = GrammarConfig(compile_timeout=120.0)
"""Nothing of `SPECS` takes long to compile; a machine may be busy, and that is no difference."""


def compile_grammars(model: LoadedModel) -> Mapping[GrammarSpec, CompiledGrammar]:
    """For the reference. Empty when the model cannot follow grammars."""
    if model.vocabulary is None:
        return {}
    with closing(GuidanceBackend(vocabulary=model.vocabulary, config=PATIENT)) as backend:
        return {spec: backend.compile(spec) for spec in SPECS}


TOPICS = (
    "Tell me a story about a fox who lives near a river.",
    "What is the capital of France?",
    "Explain how to make a cup of tea, step by step.",
    "My name is Ada and I like the colour green. What should I plant in my garden?",  # words: ok
    "Count from one to ten.",
    "Once upon a time, in a village by the sea,",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Token ids of the prompts and how much to generate after each."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


def make_prompts(model_path: str, vocab_size: int, *, quick: bool) -> PromptSet:
    """Text prompts where the checkpoint has a tokenizer, random ids beside them; deterministic."""
    rng = random.Random(20)
    texts = [_encode(model_path, text) for text in TOPICS] if (Path(model_path) / "tokenizer.json").is_file() else []
    shared = [rng.randrange(vocab_size) for _ in range(70)]
    lengths: Sequence[int] = (1, 5, 17) if quick else (1, 2, 15, 16, 17, 33, 64, 131, 260)
    randoms = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    sharing = [
        shared + [rng.randrange(vocab_size) for _ in range(extra)] for extra in ((3, 20) if quick else (1, 3, 20, 45))
    ]
    chosen = (texts[:2] if quick else texts) + randoms + sharing
    return PromptSet(prompts=tuple(tuple(p) for p in chosen if p), max_tokens=16 if quick else 40)


def _encode(model_path: str, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = (
        Tokenizer.from_file(str(Path(model_path) / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )
    return ids


@dataclass(kw_only=True, slots=True)
class References:
    """Outputs of one model, all greedy."""

    outputs: list[ReferenceOutput] = field(default_factory=list)
    """Of every prompt, then with grammars, then with a reasoning budget."""
    edited: list[ReferenceOutput] = field(default_factory=list)
    """Of the plain prompts, with edits of logits."""

    @property
    def longest(self) -> int:
        """Tokens of a prompt."""
        return max(len(output.prompt) for output in self.outputs)


def generate_references(
    reference: TransformersReference, model: LoadedModel, prompts: PromptSet, *, progress: bool
) -> References:
    """Generate with transformers, with the EOS, edits and grammars that `model` serves."""
    facts, max_tokens = model.model.config, prompts.max_tokens
    eos = frozenset(facts.eos_token_ids)
    by_adapter = [
        _plain_references(reference, prompts, eos, adapter=adapter, folder=folder, progress=progress)
        for adapter, folder in ((None, None), *_adapters(model))
    ]
    _require_effect(by_adapter)
    made = References()
    # Requests of all adapters and of the model alone come in turns, so that they share batches.
    for each in zip(*(part.outputs for part in by_adapter), strict=True):
        made.outputs += each
    for each in zip(*(part.edited for part in by_adapter), strict=True):
        made.edited += each
    for prompt, (spec, grammar) in zip(prompts.prompts, compile_grammars(model).items(), strict=False):
        output = reference.generate(prompt, max_tokens, eos, ignore_eos=False, matcher=grammar.matcher())
        made.outputs.append(replace(output, grammar=spec))
    first = made.outputs[0]
    for budget in budgets_against(first.token_ids, facts.vocab_size):
        made.outputs.append(reference.generate(first.prompt, max_tokens, eos, ignore_eos=True, budget=budget))
    return made


def _adapters(model: LoadedModel) -> Iterator[tuple[AdapterRef, str]]:
    """Those of `model`, with their folders."""
    for source in model.config.adapters.sources:
        yield model.adapters.names[source.name], source.path


def _plain_references(
    reference: TransformersReference,
    prompts: PromptSet,
    eos: frozenset[int],
    *,
    adapter: AdapterRef | None,
    folder: str | None,
    progress: bool,
) -> References:
    """Of every prompt, by the model with one adapter or none."""
    made, max_tokens = References(), prompts.max_tokens
    shown = "transformers" if adapter is None else f"transformers, adapter {adapter.name}"
    with reference.adapted(folder):
        for i, prompt in enumerate(
            tqdm(prompts.prompts, desc=shown, unit="prompt", file=sys.stderr, disable=not progress)
        ):
            # Every second prompt runs to its full length whatever the model says: EOS must not end coverage early.
            plain = reference.generate(prompt, max_tokens, eos, ignore_eos=i % 2 == 1)
            made.outputs.append(replace(plain, adapter=adapter))
        for plain in made.outputs:
            edits = edits_against(plain.token_ids)
            edited = reference.generate(plain.prompt, max_tokens, eos, ignore_eos=plain.ignore_eos, edits=edits)
            made.edited.append(replace(edited, adapter=adapter))
    return made


def _require_effect(by_adapter: Sequence[References]) -> None:
    """Of each adapter, next to the model alone: one without proves nothing."""
    base = [output.token_ids for output in by_adapter[0].outputs]
    for part in by_adapter[1:]:
        if [output.token_ids for output in part.outputs] == base:
            adapter = part.outputs[0].adapter
            name = "" if adapter is None else adapter.name
            raise ConfigError(f"--adapter {name} changes none of the outputs: nothing is verified by it")
