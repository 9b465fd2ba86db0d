"""What a run measures: which engines play which workloads on which models. Frozen before anything is started."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from peers.shapes import BYTES, SHAPES
from peers.workloads import WORKLOADS

SERVED = ("disaggregated", "arrivals", "interference")
SERVED_PEERS = {"disaggregated": ("vllm",), "arrivals": ("vllm", "llama.cpp")}
OTHER = ("limits", "startup", "memory", "int8")
PARTS = (*WORKLOADS, *SERVED, *OTHER)
PEERS = ("transformers", "transformers CB", "vllm", "llama.cpp")
SMALL = "q25m"
"""The model that everything is played on."""
LARGE = "q500m"
BATCH_STREAMS = 64
FEW_STREAMS = 4
BATCH_TOKENS = BATCH_STREAMS * 704
"""KV that the largest batch needs at once; rounds after the first fill it with prefixes."""
FEW_TOKENS = FEW_STREAMS * 2304


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Engines side by side on one model."""

    model: str
    dtype: str
    engines: tuple[str, ...]
    workloads: tuple[str, ...]
    rounds: int
    streams: int
    """Requests at once that the workloads need."""
    first_round: int = 0
    """Rounds of two comparisons of one model are told apart by their numbers."""

    @property
    def kv_bytes(self) -> int:
        return kv_bytes(self.model, self.dtype, self.streams)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    comparisons: tuple[Comparison, ...]
    parts: frozenset[str]
    served_dtypes: tuple[str, ...]
    """Those that servers are measured with; none without a part that needs them."""
    peers: frozenset[str]
    threads: int
    budget_s: float
    arrivals: int
    """Requests at each rate."""
    interference_rounds: int
    disaggregated_rounds: int
    remembered: tuple[tuple[str, str], ...]
    """Model and dtype of the workers whose memory is looked at."""
    held: tuple[tuple[str, str], ...]
    """Model and dtype of the engines whose weights are held as int8, too."""

    @property
    def wanted_peers(self) -> set[str]:
        """Those that anything in it needs."""
        compared = {name for comparison in self.comparisons for name in comparison.engines}
        served = {name for part in self.parts & SERVED_PEERS.keys() for name in SERVED_PEERS[part]}
        return self.peers & (compared | (served if self.served_dtypes else set()))

    @property
    def models(self) -> list[str]:
        served = [SMALL] if self.served_dtypes else []
        remembered = [model for model, _ in self.remembered]
        return list(dict.fromkeys([*(comparison.model for comparison in self.comparisons), *served, *remembered]))


def kv_bytes(model: str, dtype: str, streams: int) -> int:
    """What the KV pool of an engine holds: what the workloads need, so that after some rounds it is full."""
    return SHAPES[model].kv_bytes(FEW_TOKENS if streams <= FEW_STREAMS else BATCH_TOKENS, dtype)


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the command line asks for."""
    parts = frozenset(options.only or PARTS)
    peers = frozenset(options.peers if options.peers is not None else PEERS)
    models = options.models or (list(SHAPES) if options.full else [SMALL] if options.quick else [SMALL, LARGE])
    dtypes = options.dtypes or (["float32"] if options.quick else list(BYTES))
    rounds = options.rounds or (1 if options.quick else 5 if options.full else 3)
    comparisons = [
        comparison
        for model in models
        for dtype in dtypes
        for comparison in _comparisons(model, dtype, parts, peers, rounds, full=options.full)
    ]
    served = parts & set(SERVED) and SMALL in models
    return Plan(
        comparisons=tuple(comparisons),
        parts=parts,
        served_dtypes=tuple(dtypes if options.full else dtypes[:1]) if served else (),
        peers=peers,
        threads=options.threads,
        budget_s=options.budget,
        arrivals=16 if options.quick else 64 if options.full else 32,
        interference_rounds=rounds if options.quick else rounds + 2,
        disaggregated_rounds=min(2, rounds),
        remembered=tuple((model, dtype) for model in models for dtype in dtypes) if "memory" in parts else (),
        held=tuple((model, dtypes[-1]) for model in models[-1:]) if "int8" in parts else (),
    )


def _comparisons(
    model: str, dtype: str, parts: frozenset[str], peers: frozenset[str], rounds: int, *, full: bool
) -> list[Comparison]:
    """One for all engines, and one for continuous batching, whose set-up is slow enough for a round to do."""
    played = tuple(name for name in WORKLOADS if name in parts)
    if model != SMALL and not full:
        played = tuple(name for name in played if name in ("single", "prefill"))
    known = ("transformers", "vllm", "llama.cpp") if model == SMALL or full else ("vllm", "llama.cpp")
    side_by_side = ("tandem", *(name for name in known if name in peers))
    found = [_comparison(model, dtype, side_by_side, played, rounds)]
    few = tuple(name for name in played if name in ("offline", "single"))
    if "transformers CB" in peers and (full or (model == SMALL and dtype == "float32")):
        found.append(_comparison(model, dtype, ("tandem", "transformers CB"), few, 1, first_round=100))
    return [comparison for comparison in found if comparison.workloads]


def _comparison(
    model: str, dtype: str, engines: Sequence[str], workloads: tuple[str, ...], rounds: int, *, first_round: int = 0
) -> Comparison:
    batch = any(name not in ("single", "prefill") for name in workloads)
    return Comparison(
        model=model,
        dtype=dtype,
        engines=tuple(engines),
        workloads=workloads,
        rounds=rounds,
        streams=BATCH_STREAMS if batch else FEW_STREAMS,
        first_round=first_round,
    )
