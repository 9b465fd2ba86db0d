"""Orders of an operator, on the bundled model."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.config import AdapterConfig, CacheConfig, EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.control import Operations
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.messages.control import (
    AbortRequests,
    DecodeElsewhere,
    FlushCache,
    LoadAdapter,
    OrderDone,
    OrderRefused,
    PauseGeneration,
    PauseMode,
    ReloadWeights,
    ResumeGeneration,
    StartProfile,
    StopProfile,
    UnloadAdapter,
)
from tandem_engine.messages.outputs import FinishReason, TokenOutput
from tandem_engine.messages.requests import AdapterRef, GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_testing.adapters import write_adapter

MODEL = Path(__file__).resolve().parents[3] / "models" / "tandem-mini"


class OperationsHarness:
    """An engine, its operations, what they answered and what clients got."""

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self.outputs: list[TokenOutput] = []
        self.answers: list[OrderDone | OrderRefused] = []
        self.announced: list[str] = []
        self.engine = Engine.build(loaded, loaded.config, sink=lambda _, outputs: self.outputs.extend(outputs))
        self.operations = Operations(
            engine=self.engine,
            profiler=self.engine.profiler(folder),
            answer=self.answers.append,
            changed=lambda: self.announced.append(self.engine.compat_hash),
        )

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()
            self.operations.poll()

    def run(self) -> None:
        while not self.engine.scheduler.idle:
            self.turn()

    def tokens(self, rid: str) -> list[int]:
        return [token for output in self.outputs if output.rid == rid for token in output.token_ids]

    def finish(self, rid: str):
        return next((output.finish for output in self.outputs if output.rid == rid and output.finish), None)

    def wait_for_reload(self) -> None:
        """Steps continue while weights load, but not as many as a request has tokens."""
        self.turn(20)
        while self.operations.reloading is not None:
            if (loading := self.engine._reload._loading) is not None:
                wait([loading])
            self.turn()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = EngineConfig(model_path=str(MODEL), dtype="float32", cache=CacheConfig(num_pages=200), threads=1)
    return load(config, progress=False)


@pytest.fixture
def server(loaded, tmp_path) -> Iterator[OperationsHarness]:
    server = OperationsHarness(loaded, tmp_path / "traces")
    yield server
    server.operations.close()
    assert server.engine.audit().problems == ()
    server.engine.close()


def request(rid: str, **sampling) -> GenerateRequest:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(rid=rid, input_ids=tuple(range(10, 50)), sampling=SamplingParams(**params))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """`other`: one weight differs; `broken`: all logits are equal; `taller`: another architecture."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("other", "broken", "taller"):
        shutil.copytree(MODEL, root / name)
    _change(root / "other", lambda tensor: tensor.flip(0).contiguous())
    _change(root / "broken", torch.zeros_like)
    config = json.loads((root / "taller" / "config.json").read_text())
    (root / "taller" / "config.json").write_text(json.dumps({**config, "rope_parameters": None, "rope_theta": 5e5}))
    return root


def _change(folder: Path, change) -> None:
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = change(tensors["model.norm.weight"])
            save_file(tensors, shard)


def test_one_request_is_aborted_by_its_exact_id(server):  # [exact-ids]
    for rid in ("job", "job-1"):
        server.engine.add(request(rid))
    server.turn(2)
    server.operations.handle(AbortRequests(nonce=1, rid="job"))
    server.operations.handle(AbortRequests(nonce=2, rid="jo"))
    server.run()
    assert [answer.figures for answer in server.answers] == [{"requests": 1}, {"requests": 0}]
    assert server.finish("job").reason is FinishReason.ABORT
    assert server.finish("job-1").reason is FinishReason.LENGTH


def test_all_requests_are_aborted_at_once(server):
    for rid in ("a", "b"):
        server.engine.add(request(rid))
    server.operations.handle(AbortRequests(nonce=1, rid=None))
    server.run()
    assert server.answers[0].figures == {"requests": 2}
    assert {server.finish(rid).reason for rid in "ab"} == {FinishReason.ABORT}


def test_pause_flush_resume_keeps_the_output(server):
    server.engine.add(request("whole"))
    server.run()
    server.engine.add(request("paused"))
    server.turn(5)
    server.operations.handle(FlushCache(nonce=1))
    server.operations.handle(PauseGeneration(nonce=2, mode=PauseMode.RETRACT))
    server.operations.handle(FlushCache(nonce=3))
    server.turn(3)
    server.operations.handle(ResumeGeneration(nonce=4))
    server.run()
    refused, *done = server.answers
    assert (refused.code, refused.nonce) == ("busy", 1)
    assert [answer.nonce for answer in done] == [2, 3, 4]
    assert done[1].figures["pages"] > 0
    assert server.tokens("paused") == server.tokens("whole")


def test_reloaded_weights_serve_next_and_hash_is_announced(server, checkpoints):
    before = server.engine.compat_hash
    server.engine.add(request("old"))
    server.run()
    server.engine.add(request("begun", max_tokens=200))
    server.turn(3)
    server.operations.handle(ReloadWeights(nonce=5, path=str(checkpoints / "other")))
    server.operations.handle(ReloadWeights(nonce=6, path=None))
    server.wait_for_reload()
    assert isinstance(server.answers[0], OrderRefused), "one reload at a time"
    assert (server.answers[1].nonce, server.answers[1].figures["ended"]) == (5, 1)
    assert (server.finish("begun").code, server.finish("begun").retryable) == ("model_replaced", True)
    assert server.announced == [server.engine.compat_hash] != [before]
    assert server.engine.audit().tree == 0, "KV of the old weights is gone"
    server.engine.add(request("new"))
    server.run()
    assert server.tokens("new") != server.tokens("old")


def test_reloading_the_served_folder_changes_no_token(server):
    server.engine.add(request("old"))
    server.run()
    before = server.engine.compat_hash
    server.operations.handle(ReloadWeights(nonce=5, path=None))
    server.wait_for_reload()
    assert server.announced == [before]
    server.engine.add(request("new"))
    server.run()
    assert server.tokens("new") == server.tokens("old")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("absent", "checkpoint_error", "absent"),
        ("broken", "checkpoint_error", "same logit"),
        ("taller", "config_error", "rope"),
    ],
)
def test_weights_that_cannot_serve_change_nothing(server, checkpoints, name, code, text):
    server.engine.add(request("old"))
    server.run()
    server.engine.add(request("running"))
    server.turn(3)
    server.operations.handle(ReloadWeights(nonce=5, path=str(checkpoints / name)))
    server.wait_for_reload()
    server.run()
    [answer] = server.answers
    assert (answer.nonce, answer.code) == (5, code)
    assert text in answer.message
    assert server.announced == []
    assert server.tokens("running") == server.tokens("old")
    server.operations.handle(ReloadWeights(nonce=6, path=None))
    server.wait_for_reload()
    assert server.answers[-1].message == f"serving the weights in {MODEL}", "the failed folder is forgotten"


def test_trace_of_so_many_steps_is_written_and_can_be_read(server, tmp_path):
    server.operations.handle(StartProfile(nonce=1, steps=3, seconds=60.0))
    server.operations.handle(StartProfile(nonce=2, steps=3, seconds=60.0))
    server.engine.add(request("traced"))
    server.run()
    started, refused = server.answers
    assert refused.code == "busy"
    path = Path(str(started.figures["path"]))
    assert path.parent == tmp_path / "traces"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert any("mkldnn" in name or "linear" in name for name in names if name)


def test_trace_is_ended_early_and_a_second_end_is_refused(server):
    server.operations.handle(StartProfile(nonce=1, steps=1000, seconds=60.0))
    server.operations.handle(StopProfile(nonce=2))
    server.operations.handle(StopProfile(nonce=3))
    started, stopped, refused = server.answers
    assert stopped.figures == started.figures
    assert Path(str(stopped.figures["path"])).is_file()
    assert refused.code == "busy"


@pytest.mark.parametrize(("steps", "seconds", "text"), [(0, 1.0, "steps"), (1, 1e9, "seconds"), (1, 0.0, "seconds")])
def test_trace_has_bounds(server, steps, seconds, text):
    server.operations.handle(StartProfile(nonce=1, steps=steps, seconds=seconds))
    assert (server.answers[0].code, text in server.answers[0].message) == ("config_error", True)


def test_without_a_folder_nothing_is_traced(loaded):
    with Engine.build(loaded, loaded.config) as engine, pytest.raises(Exception, match="--torch-profiler-dir"):
        engine.profiler(None).start(launched=0, steps=1, seconds=1.0)


def test_engine_without_sender_reports_zero_migrations(server):
    server.engine.add(request("r"))
    server.turn(3)
    server.operations.handle(DecodeElsewhere(nonce=4, wanted=True))
    assert (server.answers[-1].nonce, server.answers[-1].figures) == (4, {"leaving": 0})
    server.run()
    assert len(server.tokens("r")) == 12


# Adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "one", MODEL, seed=1, strength=0.2)
    write_adapter(root / "two", MODEL, seed=2, modules=["q_proj"], strength=0.2)
    (root / "circle").symlink_to(root / "circle")
    return root


@pytest.fixture
def open_harness(loaded, adapters, tmp_path) -> Iterator[OperationsHarness]:
    """An engine whose adapters may change."""
    config = replace(loaded.config, adapters=AdapterConfig(folder=str(adapters), allow_updates=True, max_loaded=2))
    server = OperationsHarness(replace(loaded, config=config), tmp_path / "traces")
    yield server
    server.run()
    assert server.engine.audit().problems == ()
    server.engine.close()


def load_adapter(
    server: OperationsHarness, name: str, path: str, *, replaces: bool = False
) -> OrderDone | OrderRefused:
    """Steps continue until it is answered."""
    server.answers.clear()
    server.operations.handle(LoadAdapter(nonce=1, name=name, path=path, replaces=replaces))
    while server.operations.changing:
        wait([server.operations.changing[0][1]], timeout=0.01)
        server.turn()
    [answer] = server.answers
    return answer


def of_adapter(rid: str, answer: OrderDone | OrderRefused, **sampling) -> GenerateRequest:
    assert isinstance(answer, OrderDone), answer
    ref = AdapterRef(name="a", digest=bytes.fromhex(str(answer.figures["digest"])))
    return msgspec.structs.replace(request(rid, **sampling), adapter=ref)


def test_loaded_adapter_computes_requests_that_name_it(open_harness):
    done = load_adapter(open_harness, "a", "one")
    assert [adapter.name for adapter in open_harness.engine.served_adapters] == ["a"]
    open_harness.engine.add(of_adapter("adapted", done))
    open_harness.engine.add(request("base"))
    open_harness.run()
    assert open_harness.finish("adapted").reason is FinishReason.LENGTH
    assert open_harness.tokens("adapted") != open_harness.tokens("base")


def test_running_requests_end_with_the_adapter_that_was_replaced(open_harness):
    done = load_adapter(open_harness, "a", "one")
    open_harness.engine.add(of_adapter("alone", done, max_tokens=40))
    open_harness.run()
    open_harness.engine.add(of_adapter("running", done, max_tokens=40))
    open_harness.turn(4)
    assert 0 < len(open_harness.tokens("running")) < 40
    stats = open_harness.engine.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (("a",), ())
    again = load_adapter(open_harness, "a", "two", replaces=True)
    open_harness.engine.add(of_adapter("late", done))
    open_harness.engine.add(of_adapter("new", again, max_tokens=40))
    open_harness.run()
    assert open_harness.tokens("running") == open_harness.tokens("alone") != open_harness.tokens("new")
    assert (open_harness.finish("late").code, open_harness.finish("late").retryable) == ("adapter_missing", True)
    open_harness.turn(2)
    assert [*open_harness.engine._parts.shelf.table.slots] == [bytes.fromhex(str(again.figures["digest"]))]


def test_unloaded_adapter_is_freed_after_its_last_request(open_harness):
    done = load_adapter(open_harness, "a", "one")
    open_harness.engine.add(of_adapter("running", done, max_tokens=30))
    open_harness.turn(3)
    open_harness.operations.handle(UnloadAdapter(nonce=2, name="a"))
    assert not open_harness.engine.served_adapters
    table = open_harness.engine._parts.shelf.table
    open_harness.turn(3)
    assert table.slots
    open_harness.run()
    open_harness.turn(2)
    assert open_harness.finish("running").reason is FinishReason.LENGTH
    assert (table.slots, table.closed, [weights.sites for weights in table.weights]) == ({}, set(), [{}])


@pytest.mark.parametrize(
    ("name", "path", "code", "message"),
    [
        ("b", "none", "checkpoint_error", "none"),
        ("b", "../x", "config_error", "'../x' is outside --lora-dir"),
        ("b", "", "config_error", "the folder of 'b' must be a path"),
        ("b", "one\0", "config_error", "the folder of 'b' must be a path"),
        ("b", "circle", "config_error", "'circle' is no usable path"),
        ("b", "x" * 300, "checkpoint_error", "File name too long"),
        ("b:c", "one", "config_error", "a name has 1 to 128 bytes"),
        ("a", "two", "config_error", "'a' is loaded already"),
    ],
)
def test_adapter_that_cannot_be_loaded_changes_nothing(open_harness, name, path, code, message):
    load_adapter(open_harness, "a", "one")
    before = open_harness.engine.served_adapters
    answer = load_adapter(open_harness, name, path)
    assert isinstance(answer, OrderRefused)
    assert (answer.code, message in answer.message) == (code, True), answer
    assert open_harness.engine.served_adapters == before


@pytest.mark.parametrize(
    "order", [LoadAdapter(nonce=1, name="a", path="one", replaces=False), UnloadAdapter(nonce=1, name="a")]
)
def test_adapters_do_not_change_without_the_flag(server, order):
    server.operations.handle(order)
    [answer] = server.answers
    assert isinstance(answer, OrderRefused)
    assert "--allow-runtime-lora-updating" in answer.message
