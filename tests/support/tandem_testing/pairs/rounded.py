"""The options of an engine beside dtypes that round: logprobs within a bound, since tokens may differ.

Each row is an `LLM` in bfloat16, or with KV in float8, with the row's options. transformers in float32, with the
numbers that the weights have, scores the tokens of the row. Each must be as likely as the engine says, within a bound,
and the likeliest within twice that:

    bfloat16      twice the largest error of transformers in bfloat16, as in `tandem verify`
    float8 KV     twice the largest error of the engine without the row's options: transformers has no such KV
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem_engine import LLM, SamplingParams
from tandem_engine.base.errors import ConfigError
from tandem_lab.verify.compare import MARGIN, MIN_BOUND, RememberedScores, logprob_bound
from tandem_lab.verify.reference import ReferenceOutput, TransformersReference
from tandem_testing.pairs.asking import Outcome
from tandem_testing.pairs.covering import Axis, Row, covering_rows
from tandem_testing.pairs.fields import Parts
from tandem_testing.pairs.options import AXES, MODEL, PROMPTS, REFUSED, ROUNDS, axes_of, options_of

NUMBERS: Parts = {
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, float8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "float32, float8 KV": {"dtype": "float32", "kv_cache_dtype": "fp8"},
}
ROUNDED_AXES: Mapping[str, Parts] = {"numbers": NUMBERS, **AXES}
DRAWN = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=0)


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine answered, and how likely it says that its tokens are."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def rounded_rows(seed: int, *, small: bool = False) -> list[Row]:
    """`small`: each axis of options has its first value and another one of the seed's."""
    axes = [Axis("numbers", tuple(NUMBERS)), *axes_of(AXES, seed, small=small)]
    known = {value for axis in axes for value in axis.named()}
    return covering_rows(axes, [each for each in REFUSED if each.pair <= known], seed=seed)


def generated(row: Row, folder: Path) -> list[Generated]:
    """Of each prompt and round."""
    found = []
    options = options_of(row, folder, ROUNDED_AXES)
    with LLM(MODEL, progress=False, **options) as llm:
        for _ in range(ROUNDS):
            for output in llm.generate(PROMPTS, DRAWN, use_tqdm=False):
                choice = output.outputs[0]
                scores = zip(choice.token_ids, choice.logprobs or (), strict=True)
                logprobs = tuple(float(at[token].logprob) for token, at in scores)
                found.append(Generated(tuple(output.prompt_token_ids), tuple(choice.token_ids), logprobs))
    return found


@dataclass(slots=True)
class Judge:
    """Compares with transformers. `bounds`: by name of the numbers."""

    truth: RememberedScores
    bounds: dict[str, float]

    @classmethod
    def measured(cls, folder: Path) -> "Judge":
        # Weights are stored in bfloat16: in float32 they are the same numbers.
        truth = RememberedScores(TransformersReference(str(MODEL), weights=torch.bfloat16).score)
        judge = cls(truth, {})
        for name in NUMBERS:
            own = folder / name.replace(" ", "-")
            own.mkdir()
            plain = generated({"numbers": name}, own)
            if "float8" in name:
                judge.bounds[name] = max(MIN_BOUND, MARGIN * max(judge.errors(plain)))
            else:
                rounded = TransformersReference(str(MODEL), weights=torch.bfloat16, computes=torch.bfloat16)
                judge.bounds[name] = logprob_bound(truth, rounded.score, [_reference(each) for each in plain])
        return judge

    def errors(self, outputs: Sequence[Generated]) -> list[float]:
        """How far each logprob is from the truth."""
        return [
            abs(mine - exact)
            for each in outputs
            for mine, exact in zip(each.logprobs, self.truth(each.prompt, each.token_ids).logprobs, strict=True)
        ]

    def problems(self, numbers: str, outputs: Sequence[Generated]) -> list[str]:
        """What is out of bounds."""
        bound, found = self.bounds[numbers], []
        for each in outputs:
            worst = max(self.errors([each]))
            behind = max(self.truth(each.prompt, each.token_ids).behind)
            if not worst <= bound:  # as of what is no number
                found.append(f"logprobs {worst:.4f} from those of transformers, {bound:.4f} allowed: {each.token_ids}")
            if behind > 2 * bound:
                found.append(f"a token {behind:.4f} behind the likeliest, {2 * bound:.4f} allowed: {each.token_ids}")
            if len(each.token_ids) != DRAWN.max_tokens:
                found.append(f"{len(each.token_ids)} tokens of {DRAWN.max_tokens}")
        return found


def compare_rounded(rows: Sequence[Row], folder: Path, judge: Judge) -> list[Outcome]:
    """Each row with transformers. `folder` is for what rows write."""
    outcomes = []
    for number, row in enumerate(rows):
        own = folder / str(number)
        own.mkdir()
        outcome = Outcome(row=row)
        try:
            outcome.problems += judge.problems(row["numbers"], generated(row, own))
        except ConfigError as error:
            outcome.problems.append(f"refused: {error}")
        outcomes.append(outcome)
    return outcomes


def _reference(each: Generated) -> ReferenceOutput:
    return ReferenceOutput(prompt=each.prompt, token_ids=each.token_ids, logprobs=each.logprobs, ignore_eos=True)
