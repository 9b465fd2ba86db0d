"""A few paths of `tandem verify` on one checkpoint, for the many models that need not take them all."""

from collections.abc import Sequence
from pathlib import Path

from tandem_engine.config import EngineConfig, ModelImpl
from tandem_engine.engine import load
from tandem_engine.verify.command import Verification
from tandem_engine.verify.compare import PathResult
from tandem_engine.verify.paths import make_paths, on_ranks
from tandem_engine.verify.prompts import make_prompts
from tandem_engine.verify.reference import TransformersReference

CHUNKED, CACHED, MIXED, RETRACTED = "chunked by 7, overlap", "prefix-cached", "mixed, staggered", "retracted (forced)"
CONTINUED = "continued in sessions"
DISAGGREGATED = "disaggregated over NIXL"
SWAPPED, HOST, FILES = "swapped (forced)", "host cache, write_back", "files, after a restart"
SHARED = "mixed, staggered, 2 ranks"
UNEQUAL = ("disaggregated over NIXL, 1 to 2 ranks", "disaggregated over NIXL, 2 to 1 ranks")


def run_paths(checkpoint: Path, names: Sequence[str], *, impl: ModelImpl = ModelImpl.AUTO) -> list[PathResult]:
    """Results of the named paths, in their order; prompts are some tokens to some ninety."""
    model = load(EngineConfig(model_path=str(checkpoint), model_impl=impl, dtype="float32"), progress=False)
    facts = model.model_config
    prompts = make_prompts(str(checkpoint), facts.vocab_size, quick=True)
    reference = TransformersReference(str(checkpoint))
    references = [
        reference.generate(prompt, prompts.max_tokens, frozenset(facts.eos_token_ids), ignore_eos=True)
        for prompt in prompts.prompts
    ]
    longest = max(len(prompt) for prompt in prompts.prompts) + prompts.max_tokens
    paths = make_paths(context_length=longest + 1, longest=longest, num_prompts=len(references), quick=False)
    by_name = {path.name: path for path in [*paths, *on_ranks(paths, 2, quick=True)]}
    verification = Verification(model=model, references=references, max_tokens=prompts.max_tokens)
    return [verification.run(by_name[name]) for name in names]
