"""Libraries for long prompts: what they compute, what they refuse, and which one is chosen."""

import itertools
import logging
from dataclasses import dataclass, field, replace

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import AttentionLibrary
from tandem_engine.config.engine import EngineConfig
from tandem_engine.model.attention import prompt_libraries
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.long_rows import LongRow, attend_gathered
from tandem_engine.model.attention.prompt_choice import BUDGET_S, NONE, PromptChoice, PromptChooser, device_seconds
from tandem_engine.model.attention.prompt_libraries import (
    AUTO,
    LIBRARIES,
    OURS,
    AttentionFacts,
    Library,
    Supports,
    load_flash,
)
from tandem_engine.model.attention.reference import attend_dense
from tandem_testing.forward_builders import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, make_pool
from tandem_testing.scheduler_builders import ManualClock

SPEC = AttentionSpec(scale=HEAD_DIM**-0.5)
WINDOW, CAPPED = replace(SPEC, window=20), replace(SPEC, soft_cap=2.0)
FACTS = AttentionFacts(
    heads=NUM_HEADS,
    kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    dtype=torch.bfloat16,
    pool_dtype=torch.bfloat16,
    page_size=16,
    device=torch.device("cpu"),
)
BY_NAME = {library.name: library for library in LIBRARIES}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "spec", "before"),
    [
        ("torch_sdpa", SPEC, 0),
        ("flex_attention", SPEC, 0),
        ("flex_attention", SPEC, 75),
        ("flex_attention", WINDOW, 75),
        ("flex_attention", CAPPED, 75),
    ],
)
def test_library_computes_what_the_reference_does(name, spec, before, monkeypatch):
    """Of pages in no order, a K/V head at a time; a partial last page has numbers that no query may see."""
    monkeypatch.setattr("tandem_engine.model.attention.long_rows.GATHER_BYTES", 1)
    library, tokens = BY_NAME[name], before + 60
    assert library.supports.refusal(FACTS, spec) == ""
    pool = make_pool(dtype=torch.bfloat16)
    pages = torch.tensor([9, 3, 12, 4, 30, 2, 8, 1, 7], dtype=torch.int32)
    places = torch.arange(tokens)
    keys, values = pool.gathered(1, pages[places // 16].long(), places % 16)
    q = torch.randn(60, NUM_HEADS, HEAD_DIM).bfloat16()
    out = torch.empty_like(q)
    row = LongRow(row=0, start=0, queries=60, tokens=tokens, attend=library.load(FACTS))
    attend_gathered(pool, 1, spec, row, q, out, pages)
    torch.testing.assert_close(out.float(), attend_dense(q.float(), keys, values, before, spec), rtol=0.02, atol=0.02)


def test_torch_flash_attention_is_called_as_each_version_of_torch_has_it(monkeypatch):
    """A causal window of all tokens is (-1, 0), or a flag; heads and splits are said where they can be."""
    from torch.nn.attention import varlen

    q, keys, values = (torch.zeros(n, NUM_HEADS, HEAD_DIM) for n in (5, NUM_KV_HEADS, NUM_KV_HEADS))
    calls = []

    def flagged(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None):
        calls.append(([*cu_seq_q.tolist(), *cu_seq_k.tolist()], max_q, max_k, is_causal))
        return query

    def windowed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return flagged(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size)

    def newest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, num_splits):
        assert (enable_gqa, num_splits) == (True, 1)
        return windowed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    for each in (windowed, newest):
        monkeypatch.setattr(varlen, "varlen_attn", each)
        for spec in (SPEC, WINDOW):
            load_flash(FACTS)(q, keys, values, spec)
    assert calls == [([0, 5, 0, NUM_HEADS], 5, NUM_HEADS, window) for window in ((-1, 0), (19, 0))] * 2
    monkeypatch.setattr(varlen, "varlen_attn", flagged)
    load_flash(FACTS)(q, keys, values, SPEC)
    assert calls[-1][-1] is True
    with pytest.raises(NotImplementedError, match="no windows"):
        load_flash(FACTS)(q, keys, values, WINDOW)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_no_library_takes_what_only_our_kernels_compute(library):
    def refusal(spec=SPEC, **facts) -> str:
        return library.supports.refusal(FACTS._replace(**facts), spec)

    assert "float32 is computed exactly" in refusal(dtype=torch.float32, pool_dtype=torch.float32)
    assert refusal(pool_dtype=torch.float8_e4m3fn) == "pages are float8_e4m3fn"
    assert refusal(latents=True) == "the model stores latents"
    assert refusal(replace(SPEC, chunk=8)) == "layers see chunks"
    assert refusal(replace(SPEC, sinks=torch.zeros(NUM_HEADS))) == "layers have sinks"
    assert refusal(head_dim=20) == "heads have 20 numbers"


def test_refusals_name_what_is_missing():
    assert BY_NAME["flash_attn"].supports.refusal(FACTS, SPEC) == "it needs a GPU"
    assert BY_NAME["torch_sdpa"].supports.refusal(FACTS, WINDOW) == "layers have a window"
    absent = Supports(module="no_such_library", cpu=True)
    assert absent.refusal(FACTS, SPEC) == "no_such_library is not installed"


@dataclass
class Trials:
    """Libraries that compute nothing, with the milliseconds that they would take, and what was asked of them."""

    times: dict[str, float]
    """Of ours, and of each."""
    results: dict[str, float | Exception] = field(default_factory=dict)
    """What a call gives, 1.0 unless it is named here."""
    loaded: list[str] = field(default_factory=list)
    timed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def library(self, name: str, **supports: object) -> Library:
        def load(_facts: AttentionFacts):
            self.loaded.append(name)
            result = self.results.get(name, 1.0)
            if isinstance(result, ImportError):
                raise result
            return name

        return Library(name=name, supports=Supports(cpu=True, **supports), load=load)

    def run(self, attend: object, queries: int, before: int):
        def call() -> torch.Tensor:
            result = self.results.get(attend or OURS, 1.0)
            if isinstance(result, Exception):
                raise result
            return torch.full((queries,), result)

        call.name = attend or OURS
        return call

    def time_of(self, runs) -> float:
        [name] = {run.name for run in runs}
        self.timed.append(name)
        self.seconds += 10.0
        return self.times[name] / 1000

    def chooser(self, *names: str, wanted: str = AUTO, folder=None, **supports: object) -> PromptChooser:
        return PromptChooser(
            wanted=wanted,
            libraries=[self.library(name, **supports) for name in names],
            folder=lambda: folder,
            time_of=self.time_of,
            now=lambda: self.seconds,
        )


def test_fastest_library_is_chosen_and_the_log_has_the_times(caplog):
    caplog.set_level(logging.INFO)
    trials = Trials(
        {OURS: 2.0, "slow": 3.0, "fast": 1.0}, results={"wrong": 1.5, "broken": ImportError("no .so\nat x")}
    )
    chooser = trials.chooser("slow", "wrong", "broken", "fast")
    assert chooser.choose(FACTS, SPEC, trials.run) == PromptChoice("fast", "fast")
    first = caplog.messages[0]
    assert "fast (measured: triton_attn 2.00 ms, slow 3.00 ms, fast 1.00 ms)" in first
    assert "not used: wrong: differs by 0.5 where 0.0156 is rounding; broken: failed: ImportError: no .so" in first
    chooser.choose(FACTS, SPEC, trials.run)
    assert len(caplog.messages) == 2, "once in a process, for rows with a prefix and without"


@pytest.mark.parametrize("theirs", [1.0, 0.96, float("nan")])
def test_library_that_gains_nothing_or_gives_no_numbers_is_not_used(theirs):
    results = {} if theirs == theirs else {"it": theirs}
    trials = Trials({OURS: 1.0, "it": theirs}, results=results)
    assert trials.chooser("it").choose(FACTS, SPEC, trials.run) == NONE


def test_later_start_reads_what_an_earlier_one_measured(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trials = Trials({OURS: 2.0, "it": 1.0})
    folder = tmp_path / "new"
    assert trials.chooser("it", folder=folder).choose(FACTS, SPEC, trials.run) == PromptChoice("it", "it")
    assert len([*folder.iterdir()]) == 2
    trials.timed.clear()
    assert trials.chooser("it", folder=folder).choose(FACTS, SPEC, trials.run) == PromptChoice("it", "it")
    assert trials.timed == []
    assert "it (measured by an earlier start: triton_attn 2.00 ms, it 1.00 ms)" in caplog.messages[-1]
    for file in folder.iterdir():
        file.write_text('{"triton_attn": "x"}')
    trials.chooser("it", folder=folder).choose(FACTS, SPEC, trials.run)
    assert trials.timed == [OURS, "it"] * 2, "a file that says nothing is measured again"
    trials.timed.clear()
    trials.results["it"] = RuntimeError("gone")
    assert trials.chooser("it", folder=folder).choose(FACTS, SPEC, trials.run) == NONE
    assert trials.timed == [OURS] * 2, "what was fast once, and fails now"


def test_measurement_of_libraries_ends_when_its_time_budget_is_spent():
    trials = Trials({OURS: 2.0, "a": 1.5, "b": 1.2, "c": 1.0})
    assert BUDGET_S < 30.0
    assert trials.chooser("a", "b", "c").choose(FACTS, SPEC, trials.run).first == "b"


def test_row_that_is_too_long_for_a_library_costs_it_its_place(caplog):
    caplog.set_level(logging.INFO)
    trials = Trials({OURS: 2.0, "it": 1.0})

    def run(attend: object, queries: int, before: int):
        call = trials.run(attend, queries, before)
        if attend and queries > 1000:
            trials.results["it"] = torch.OutOfMemoryError("too much")
            trials.times.pop("it", None)
        return call

    assert trials.chooser("it").choose(FACTS, SPEC, run) == NONE
    assert "it: a row of 4096 tokens failed" in caplog.text


def test_library_that_prepares_for_each_length_is_measured_with_that(monkeypatch):
    """torch's cuDNN attention takes 0.4 s for each new length, and 3 ms for one that it has seen."""
    clock = ManualClock()

    class Event:
        def __init__(self, **_: object) -> None:
            self.time = 0.0

        def record(self) -> None:
            self.time = clock.now()

        def synchronize(self) -> None:
            """It is there."""

        def elapsed_time(self, other: "Event") -> float:
            return 1000 * (other.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = set()

    def run(attend: object, queries: int, before: int):
        def call() -> torch.Tensor:
            new = (attend, queries) not in seen
            seen.add((attend, queries))
            clock.time += (0.4 if attend == "cudnn" and new else 0.0) + {None: 0.005, "cudnn": 0.003, "it": 0.004}[
                attend
            ]
            return torch.ones(queries)

        return call

    chooser = Trials({}).chooser("cudnn", "it")
    chooser.time_of, chooser.now = device_seconds, clock.now
    assert chooser.choose(FACTS, SPEC, run) == PromptChoice("it", "it")


def test_rows_with_a_prefix_are_chosen_for_apart():
    trials = Trials({OURS: 2.0, "it": 1.0})
    assert trials.chooser("it", prefix=False).choose(FACTS, SPEC, trials.run) == PromptChoice("it", None)


def test_flag_names_a_library_or_ours_and_nothing_is_measured():
    trials = Trials({})
    assert trials.chooser("other", "it", wanted="it").choose(FACTS, SPEC, trials.run) == PromptChoice("it", "it")
    assert trials.chooser("it", wanted="it").choose(FACTS, WINDOW, trials.run) == NONE
    assert trials.loaded == ["it"]
    assert trials.chooser("it", wanted=OURS).choose(FACTS, SPEC, trials.run) == NONE
    assert (trials.timed, len(trials.loaded)) == ([], 1)


def test_named_library_that_cannot_be_used_is_refused_with_the_reason():
    trials = Trials({}, results={"it": RuntimeError("no kernel image\nis available")})
    with pytest.raises(ConfigError, match="--attention-backend it: failed: RuntimeError: no kernel image; use auto"):
        trials.chooser("it", wanted="it").choose(FACTS, SPEC, trials.run)
    absent = trials.chooser("it", wanted="it", module="no_such_library")
    with pytest.raises(ConfigError, match="--attention-backend it: no_such_library is not installed; use auto"):
        use(absent, FACTS, SPEC)
    exact = FACTS._replace(dtype=torch.float32, pool_dtype=torch.float32)
    with pytest.raises(ConfigError, match="float32 is computed exactly"):
        use(trials.chooser("it", wanted="it"), exact, SPEC)


def use(chooser: PromptChooser, *layers: object) -> None:
    """As the runner of a model with such layers does."""
    for facts, spec in zip(layers[::2], layers[1::2], strict=True):
        chooser.choose(facts, spec, Trials({}).run)
    chooser.require_use()


def test_named_library_that_takes_no_layer_of_a_model_is_refused():
    """And never silently ignored: gpt-oss has sinks in all layers, others see windows alone."""
    sinks = replace(SPEC, sinks=torch.zeros(NUM_HEADS))
    trials = Trials({})
    with pytest.raises(ConfigError, match="--attention-backend it: layers have sinks; use auto"):
        use(trials.chooser("it", wanted="it", window=True), FACTS, sinks, FACTS, replace(sinks, window=9))
    with pytest.raises(ConfigError, match="--attention-backend it: layers have a window; use auto"):
        use(trials.chooser("it", wanted="it"), FACTS, WINDOW)
    for wanted in (AUTO, OURS):
        use(trials.chooser("it", wanted=wanted), FACTS, sinks)


def test_log_names_layers_and_rows_that_a_named_library_does_not_take(caplog):
    """A draft model may have others than the model, and large heads may be among small ones."""
    caplog.set_level(logging.INFO)
    chooser = Trials({}).chooser("it", wanted="it", prefix=False)
    use(chooser, FACTS._replace(head_dim=512), SPEC, FACTS, SPEC, FACTS, WINDOW)
    ours = [line for line in caplog.messages if "triton_attn (whatever the flag says)" in line]
    reasons = [line.rpartition("not used: ")[2] for line in ours]
    assert reasons == [*["it: heads have 512 numbers"] * 2, "it: it takes no prefix", *["it: layers have a window"] * 2]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"triton_attn": NaN, "it": 1.0}',
        '{"triton_attn": Infinity, "it": 1.0}',
        '{"triton_attn": -1.0}',
        '{"triton_attn": true}',
        '{"triton_attn": 1.0, "other": 0.1}',
        b"\xff",
    ],
    ids=range(7),
)
def test_file_of_times_that_nobody_wrote_is_measured_again(text, tmp_path):
    trials = Trials({OURS: 2.0, "it": 1.0})
    trials.chooser("it", folder=tmp_path).choose(FACTS, SPEC, trials.run)
    for file in tmp_path.iterdir():
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    trials.timed.clear()
    assert trials.chooser("it", folder=tmp_path).choose(FACTS, SPEC, trials.run) == PromptChoice("it", "it")
    assert trials.timed == [OURS, "it"] * 2


@pytest.mark.parametrize(("queries", "tokens", "window"), [(300, 300, None), (130, 900, None), (300, 700, 300)])
def test_blocks_of_a_long_prompt_are_found_without_a_number_of_each_pair(queries, tokens, window):
    """Of 8,192 queries behind 128k tokens, `create_block_mask` would make gigabytes in each layer."""
    some, full = prompt_libraries.seen_blocks(queries, tokens, window, torch.device("cpu"))
    query, key = torch.arange(queries)[:, None] + tokens - queries, torch.arange(tokens)
    seen = query >= key if window is None else (query >= key) & (query - key < window)
    for row, column in itertools.product(range(some.shape[0]), range(some.shape[1])):
        block = seen[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
        assert not block.any() or some[row, column] or full[row, column]
        assert block.all() or not full[row, column]
    assert full.any()
    assert not (some & full).any()


def test_no_library_gets_one_head_of_several(monkeypatch):
    """One that compiles would do it again for one, in the middle of a step."""
    monkeypatch.setattr("tandem_engine.model.attention.long_rows.GATHER_BYTES", 1)
    for kv_heads, expected in ((1, [1]), (2, [2]), (3, [3]), (5, [2, 3])):
        pool, heads = make_pool(dtype=torch.bfloat16, num_kv_heads=kv_heads), []
        q = torch.zeros(16, 2 * kv_heads, HEAD_DIM, dtype=torch.bfloat16)

        def attend(q, keys, values, spec, heads=heads):
            heads.append(len(keys))
            return q

        row = LongRow(row=0, start=0, queries=16, tokens=16, attend=attend)
        attend_gathered(pool, 0, SPEC, row, q, torch.empty_like(q), torch.tensor([1]))
        assert heads == expected


def test_nothing_is_run_or_loaded_where_no_library_takes_the_layers():
    trials = Trials({})
    exact = FACTS._replace(dtype=torch.float32, pool_dtype=torch.float32)
    assert trials.chooser("it").choose(exact, SPEC, trials.run) == NONE
    assert (trials.timed, trials.loaded) == ([], [])


def test_cpu_has_no_library_to_name():
    names = {library.name for library in LIBRARIES}
    assert {kind.value for kind in AttentionLibrary} == {*names, AUTO, OURS}
    for kind in AttentionLibrary:
        if kind.value in names:
            with pytest.raises(ConfigError, match=f"--attention-backend {kind} needs a GPU"):
                EngineConfig(model_path="m", attention=kind)
    assert prompt_libraries.version_of("no-such-package") == ""
