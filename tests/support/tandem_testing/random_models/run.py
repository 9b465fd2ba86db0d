"""Random checkpoints against transformers: by their logits, by paths of `tandem verify`, or by streams of a fleet."""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
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
from tandem_testing.random_models.forms import AHEAD, HEAD, Written, write_draw
from tandem_testing.random_models.streams import by_streams
from tandem_testing.random_models.verified import verified

PATHS = (CHUNKED, CACHED, RETRACTED, DISAGGREGATED, MOVED, "page size 1")
RANKED_PATHS = (SHARED, *UNEQUAL)
HEAD_PATHS = ("EAGLE drafts, prefix-cached", "EAGLE drafts, handed over", "EAGLE drafts, drained mid-stream")


class Way(StrEnum):
    """How a draw is compared."""

    LOGITS = "logits"
    PATHS = "paths"
    VERIFY = "verify"
    """By every path of `tandem verify`."""
    FLEET = "fleet"
    """By streams of workers of which some are killed."""


def compared(
    families: Sequence[str], seeds: Sequence[int], *, way: Way = Way.LOGITS
) -> Iterator[tuple[str, str, Comparison]]:
    """FAMILY#SEED, the form of the checkpoint, and its result, of every family and seed."""
    for family in families:
        for seed in seeds:
            with TemporaryDirectory() as folder:
                # transformers has no files of numbers beside those that `tandem verify` is given.
                written = write_draw(family, seed, Path(folder), packed=way is not Way.VERIFY)
                yield f"{family}#{seed}", written.form, _outcome(way, written)


def _outcome(way: Way, written: Written) -> Comparison:
    """An exception is the outcome of its draw: the others are still compared."""
    try:
        return WAYS[way](written)
    except Exception as error:  # noqa: BLE001 - whatever an engine, a fleet or transformers raises
        return Comparison(outcome=Outcome.CRASHED, detail=repr(error))


def by_paths(written: Written) -> Comparison:
    """Token by token on engines; on two ranks too, where the model can be divided. The first difference counts."""
    try:
        model = load(EngineConfig(model_path=str(written.checkpoint), dtype="float32"), progress=False)
    except EngineError as error:
        return Comparison(outcome=Outcome.REFUSED, detail=str(error))
    ranked = RANKED_PATHS if can_share(model.model_config, 2) and written.worth is None else ()
    headed = HEAD_PATHS if written.form in (HEAD, AHEAD) else ()
    impl = model.model_config.impl
    with torch.inference_mode(), one_grammar_process():
        for name in (*PATHS, *ranked, *headed):
            (result,) = run_paths_of(model, [name], worth=written.worth)
            if not result.equal:
                return Comparison(outcome=Outcome.DIFFERENT, detail=f"{name}: {result.difference}", impl=impl)
    return Comparison(outcome=Outcome.EQUAL, impl=impl)


WAYS: dict[Way, Callable[[Written], Comparison]] = {
    Way.LOGITS: lambda written: compare(written.checkpoint, worth=written.worth),
    Way.PATHS: by_paths,
    Way.VERIFY: lambda written: verified(written.checkpoint),
    Way.FLEET: by_streams,
}
