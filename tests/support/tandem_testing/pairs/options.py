"""The options of an engine that may change how a token is computed and never which, as axes of a covering array.

Each row is an `LLM` with its options that answers the same prompts: every token is that of the plain one. Every flag of
an engine is in an axis or in `NOT_PAIRED` with the reason.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from tandem_engine import LLM, SamplingParams
from tandem_engine.base.errors import ConfigError
from tandem_testing.pairs.asking import Outcome
from tandem_testing.pairs.covering import Axis, Forbidden, Row, covering_rows
from tandem_testing.pairs.fields import Parts

MODELS = Path(__file__).resolve().parents[4] / "models"
MODEL = MODELS / "tandem-mini"
FOLDER = "FOLDER"
"""Stands for an empty folder of the row."""

_NUMBERS = "changes how numbers are rounded, and so perhaps tokens"
_DEVICE = "of a GPU: tests/gpu"
_RANKS = "starts other processes: tests/integration/test_tensor_parallel_library.py"
_SESSIONS = "of sessions, which no row has: tests/unit/engine/library/test_library_sessions.py"
_PEERS = "of transfers between workers; a library has no peers"
_ADAPTERS = "of adapters, which no row has: tests/unit/engine/library/test_library_adapters.py"
_WATCH = "watches the engine and computes nothing"

NOT_PAIRED = {
    **dict.fromkeys(("model_impl", "quantization"), _NUMBERS),
    **dict.fromkeys(("dtype", "kv_cache_dtype"), f"{_NUMBERS}: an array of its own (`rounded`)"),
    "load_format": "other weights",
    **dict.fromkeys(("device", "cuda_graph_max_bs", "cuda_graph_bs", "cuda_graph_max_bs_prefill"), _DEVICE),
    **dict.fromkeys(("cuda_graph_bs_prefill", "disable_prefill_cuda_graph", "disable_cuda_graph"), _DEVICE),
    "attention_backend": _DEVICE,
    "cpu_affinity": "takes cores of the machine that tests may not have",
    **dict.fromkeys(("tensor_parallel_size", "nnodes", "node_rank"), _RANKS),
    **dict.fromkeys(("dist_init_addr", "dist_init_timeout", "dist_timeout"), _RANKS),
    **dict.fromkeys(("session_kv_gib", "session_ttl", "max_sessions"), _SESSIONS),
    "num_pages": "another measure of kv_cache_gib",
    "mem_fraction_static": "another measure of kv_cache_gib",
    "hicache_ratio": "another measure of hicache_size",
    **dict.fromkeys(("watchdog_timeout", "crash_dump_folder", "torch_profiler_dir"), _WATCH),
    "force_fault_every": "fails requests on purpose: tests/differential/test_faults_and_pauses.py",
    **dict.fromkeys(("transport", "peer_group", "grant_timeout", "hold_timeout", "prefix_fetch_timeout"), _PEERS),
    **dict.fromkeys(("kv_digest", "kv_push_layers", "expect_transport", "link_probe_mib"), _PEERS),
    **dict.fromkeys(
        ("grammar_backend", "grammar_compile_timeout", "grammar_cache_size"), "of grammars, which no row has"
    ),
    **dict.fromkeys(("enable_lora", "lora_modules", "max_lora_rank", "max_loras", "max_cpu_loras"), _ADAPTERS),
    **dict.fromkeys(("lora_turn", "lora_dir", "allow_runtime_lora_updating"), _ADAPTERS),
}

HOST = {"enable_hierarchical_cache": True, "hicache_size": 0.02}
DRAFT = {"speculative_algorithm": "DRAFT", "speculative_draft_model_path": str(MODEL)}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(MODELS / "tandem-mini-eagle")}
AXES: Mapping[str, Parts] = {
    "threads": {"1": {"threads": 1}, "2": {"threads": 2}},
    "pages": {"default": {}, "1": {"page_size": 1}, "32": {"page_size": 32}},
    "pool": {"large": {"kv_cache_gib": 0.05}, "small": {"kv_cache_gib": 0.004}},
    "caches": {
        "prefixes": {},
        "none": {"disable_radix_cache": True},
        "write_through": HOST,
        "selective": {**HOST, "hicache_write_policy": "write_through_selective"},
        "write_back": {**HOST, "hicache_write_policy": "write_back"},
        "files": {
            **HOST,
            "hicache_storage_dir": FOLDER,
            "hicache_storage_size": 0.05,
            "hicache_storage_prefetch_timeout": 5,
        },
    },
    "preemption": {
        "default": {},
        "recompute": {"preemption_mode": "recompute"},
        "swap": {"preemption_mode": "swap", "swap_space": 0.02},
    },
    "retraction": {"when needed": {}, "every 5": {"force_retract_every": 5}},
    "context": {"default": {}, "512": {"context_length": 512}},
    "running": {"default": {}, "3": {"max_running_requests": 3}},
    "queue": {"default": {}, "4": {"max_queued_requests": 4}},
    "step": {"default": {}, "80": {"max_tokens_per_step": 80}},
    "prefill": {"default": {}, "48": {"max_prefill_tokens": 48}},
    "mixed prefill": {"default": {}, "9": {"mixed_prefill_tokens": 9}},
    "shared prefill": {"default": {}, "16": {"shared_prefill_tokens": 16}},
    "chunk": {"default": {}, "16": {"chunked_prefill_size": 16}},
    "long prompts": {"default": {}, "8": {"long_prefill_token_threshold": 8}},
    "policy": {
        "fcfs": {},
        "lpm": {"schedule_policy": "lpm"},
        "dfs-weight": {"schedule_policy": "dfs-weight"},
        "priority": {"schedule_policy": "priority", "priority_preemption_threshold": 1},
        "srf": {"schedule_policy": "srf", "policy_ageing_seconds": 1},
    },
    "delay": {"none": {}, "0.5": {"scheduler_delay_factor": 0.5}},
    "watermark": {"default": {}, "0.1": {"watermark": 0.1}},
    "mixed steps": {"on": {}, "off": {"disable_mixed_chunk": True}},
    "overlap": {"on": {}, "off": {"disable_overlap_schedule": True}},
    "audit": {"off": {}, "on": {"audit_every_step": True}},
    "speculation": {
        "none": {},
        "ngram": {"speculative_algorithm": "NGRAM"},
        "short ngrams": {
            "speculative_algorithm": "NGRAM",
            "ngram_prompt_lookup_min": 1,
            "ngram_prompt_lookup_max": 2,
            "speculative_num_draft_tokens": 2,
        },
        "draft": DRAFT,
        "few drafts": {**DRAFT, "speculative_disable_by_batch_size": 3},
        "eagle": EAGLE,
        "always eagle": {**EAGLE, "speculative_disable_adaptive": True},
    },
}
REFUSED = [Forbidden(("policy", policy), ("caches", "none")) for policy in ("lpm", "dfs-weight")]
"""An engine does not start with them: these policies go by what the prefix cache has."""

PROMPTS = (
    "Once upon a time",
    "The fox",
    "A river ran by. " * 12,
    "Once upon a time there was",
    "The owl said",
    "Anna had a cat",
)
DRAWN = (
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, n=2),
    SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.2, prompt_logprobs=0),
)
ROUNDS = 2
"""The second finds what the first has cached."""
Tokens = list[tuple[int, ...]]


def option_rows(seed: int, *, small: bool = False) -> list[Row]:
    """`small`: each axis has its first value and another one of the seed's."""
    axes = axes_of(AXES, seed, small=small)
    known = {value for axis in axes for value in axis.named()}
    return covering_rows(axes, [each for each in REFUSED if each.pair <= known], seed=seed)


def axes_of(axes: Mapping[str, Parts], seed: int, *, small: bool) -> list[Axis]:
    """As `option_rows` covers them."""
    random = Random(seed)
    every = {name: tuple(values) for name, values in axes.items()}
    if small:
        every = {name: (values[0], random.choice(values[1:])) for name, values in every.items()}
    return [Axis(name, values) for name, values in every.items()]


def options_of(row: Row, folder: Path, axes: Mapping[str, Parts] = AXES) -> dict[str, Any]:
    """Keywords of `LLM`; axes that the row leaves out have their first values."""
    parts = (values[row.get(name, next(iter(values)))] for name, values in axes.items())
    options = {option: value for part in parts for option, value in part.items()}
    return {option: str(folder) if value == FOLDER else value for option, value in options.items()}


def computed(row: Row, folder: Path) -> list[Tokens]:
    """The tokens of each choice, per prompt and round."""
    params = [DRAWN[position % len(DRAWN)] for position in range(len(PROMPTS))]
    found: list[Tokens] = []
    with LLM(MODEL, progress=False, dtype="float32", **options_of(row, folder)) as llm:
        for _ in range(ROUNDS):
            for output in llm.generate(PROMPTS, params, use_tqdm=False):
                found.append([choice.token_ids for choice in output.outputs])
    return found


def compare_options(rows: list[Row], folder: Path) -> list[Outcome]:
    """Each row with the plain engine. `folder` is for what rows write."""
    expected = computed({}, folder)
    outcomes = []
    for number, row in enumerate(rows):
        own = folder / str(number)
        own.mkdir()
        outcome = Outcome(row=row)
        try:
            outcome.compare("tokens", {"outputs": expected}, {"outputs": computed(row, own)})
        except ConfigError as error:
            outcome.problems.append(f"refused: {error}")
        outcomes.append(outcome)
    return outcomes
