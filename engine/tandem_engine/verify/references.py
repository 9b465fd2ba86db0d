"""What transformers makes of the prompts: the truth that every path is compared with."""

import sys
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from tandem_engine.loaded_model import LoadedModel
from tandem_engine.verify.edited import edits_against
from tandem_engine.verify.grammars import compile_grammars
from tandem_engine.verify.prompts import PromptSet
from tandem_engine.verify.reasoning import budgets_against
from tandem_engine.verify.reference import ReferenceOutput, TransformersReference


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
    """Have transformers generate; what it is told of EOS, edits and grammars is what `model` serves."""
    facts, max_tokens = model.model.config, prompts.max_tokens
    eos = frozenset(facts.eos_token_ids)
    made = References()
    for i, prompt in enumerate(
        tqdm(prompts.prompts, desc="transformers", unit="prompt", file=sys.stderr, disable=not progress)
    ):
        # Every second prompt runs to its full length whatever the model says: EOS must not end coverage early.
        made.outputs.append(reference.generate(prompt, max_tokens, eos, ignore_eos=i % 2 == 1))
    for plain in made.outputs:
        edits = edits_against(plain.token_ids)
        made.edited.append(reference.generate(plain.prompt, max_tokens, eos, ignore_eos=plain.ignore_eos, edits=edits))
    for prompt, (spec, grammar) in zip(prompts.prompts, compile_grammars(model).items(), strict=False):
        output = reference.generate(prompt, max_tokens, eos, ignore_eos=False, matcher=grammar.matcher())
        made.outputs.append(replace(output, grammar=spec))
    first = made.outputs[0]
    for budget in budgets_against(first.token_ids, facts.vocab_size):
        made.outputs.append(reference.generate(first.prompt, max_tokens, eos, ignore_eos=True, budget=budget))
    return made
