"""Random checkpoints against transformers, by their logits or by paths of `tandem verify`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tandem_engine.base.errors import EngineError
from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_engine.model.weights import can_share
from tandem_testing.exactness import (
    CACHED,
    CHUNKED,
    DISAGGREGATED,
    MOVED,
    RETRACTED,
    SHARED,
    UNEQUAL,
    one_grammar_process,
    run_paths_of,
)
from tandem_testing.mutated_configs.comparison import Comparison, Outcome, compare
from tandem_testing.random_models.draws import draw
from tandem_testing.tiny_checkpoints import write_checkpoint

PATHS = (CHUNKED, CACHED, RETRACTED, DISAGGREGATED, MOVED, "page size 1")
RANKED_PATHS = (SHARED, *UNEQUAL)


def compared(families: Sequence[str], seeds: Sequence[int], *, paths: bool = False) -> Iterator[tuple[str, Comparison]]:
    """FAMILY#SEED and its result, of every family and seed. `paths`: on engines, by `PATHS`."""
    for family in families:
        for seed in seeds:
            with TemporaryDirectory() as folder:
                write_checkpoint(draw(family, seed), Path(folder), seed=seed)
                yield f"{family}#{seed}", by_paths(Path(folder)) if paths else compare(Path(folder))


def by_paths(checkpoint: Path) -> Comparison:
    """Token by token on engines; on two ranks too, where the model can be divided. The first difference counts."""
    try:
        model = load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)
    except EngineError as error:
        return Comparison(outcome=Outcome.REFUSED, detail=str(error))
    ranked = RANKED_PATHS if can_share(model.model_config, 2) else ()
    impl = model.model_config.impl
    with torch.inference_mode(), one_grammar_process():
        for name in (*PATHS, *ranked):
            (result,) = run_paths_of(model, [name])
            if not result.equal:
                return Comparison(outcome=Outcome.DIFFERENT, detail=f"{name}: {result.difference}", impl=impl)
    return Comparison(outcome=Outcome.EQUAL, impl=impl)
