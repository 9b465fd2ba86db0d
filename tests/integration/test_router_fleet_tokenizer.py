"""A stand-alone router without files of its model (`--model NAME=fleet`): workers send the tokenizer."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import httpx
import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.tokenizer.bundle import TokenizerBundle
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.sockets import free_port
from tandem_services.gateway.models.fleet_tokenizer import FoundTokenizer
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoads
from tandem_services.router_server import worker_tokenizers
from tandem_services.router_server.config import TokenizedModel
from tandem_services.router_server.request_reading import RequestReading
from tandem_services.router_server.worker_tokenizers import WorkerTokenizers
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.router_builders import Fleet, make_record
from tandem_testing.service_clock import ServiceClock
from tandem_testing.tokenizer_builders import write_tokenizer

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PROGRAM = (sys.executable, "-m", "tandem_services.cli.main", "router")
PATIENCE_S = 60.0


@pytest.fixture
def rack() -> Iterator[EngineRack]:
    with EngineRack() as rack:
        yield rack


async def no_beat() -> None:
    """There is no worker."""


async def answer_of(
    http: httpx.AsyncClient, wanted: int, beat: Callable[[], Awaitable[None]] = no_beat
) -> httpx.Response:
    """The first with this status. `beat`: of the workers, in the meantime."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await beat()
            try:
                body = {"model": "alias", "prompt": "hello", "return_token_ids": True}
                answer = await http.post("/v1/choose", json=body)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == wanted:
                return answer
            await asyncio.sleep(0.1)


async def test_router_reads_text_once_a_worker_has_sent_its_tokenizer(server, rack, tmp_path):
    server.wipe()
    (folder := tmp_path / "model").mkdir()
    (write_tokenizer(folder) / "config.json").write_text("{}", encoding="utf-8")
    (private := tmp_path / "tmp").mkdir()
    port = free_port()
    flags = ("--redis-url", server.url, "--cluster", "live", "--model", "m,alias=fleet", "--port", str(port))
    environment = {**os.environ, "TMPDIR": str(private)}
    command = (*PROGRAM, *flags, "--grpc-port", str(free_port()), "--drain-notice", "0")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
                Fleet.of(server, cluster="live") as workers,
            ):
                refused = await answer_of(http, 503)
                assert "no worker has sent its tokenizer" in refused.text
                assert "retry-after" in refused.headers
                engine = rack.add("w", MockBehavior(token=hash_tokens(3, 250)))
                engine.model, engine.tokenizer = "m", TokenizerBundle.read(folder)

                async def beat() -> None:
                    await workers.beat(replace(make_record(engine.worker_id), view=engine.view))

                chosen = await answer_of(http, 200, beat)
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    assert chosen.json()["token_ids"] == TextTokenizer.load(folder).encode("hello")
    assert process.returncode == 0, errors
    assert errors.count("no tokenizer of model m") == 1, "it is logged once"


class View:
    """Workers of one model with these tokenizers."""

    def __init__(self, *digests: str) -> None:
        view = make_record("w").view
        self.views = tuple(replace(view, model="m", tokenizer=digest) for digest in digests)

    def workers(self):
        return self.views

    offered = ready = workers


MODEL = TokenizedModel(("m",), None)


class Folder:
    """Finds the tokenizer of the first offered worker."""

    def __init__(self, folder) -> None:
        self.folder = write_tokenizer(folder)
        self.found: list[str] = []

    async def find(self, offered, others):
        del others
        self.found.append(offered[0].tokenizer)
        return FoundTokenizer(offered[0].tokenizer, "", self.folder)


def tokenizers_of(fleet, source, *models: TokenizedModel) -> tuple[WorkerTokenizers, list[tuple[str, ...]]]:
    """With the names of accepted models."""
    accepted: list[tuple[str, ...]] = []

    def accept(model: TokenizedModel, tokenizer: TextTokenizer) -> None:
        assert tokenizer.vocab_size > 0
        accepted.append(model.names)

    loads = TokenizerLoads(clock=ServiceClock())
    return WorkerTokenizers(models=models, fleet=fleet, source=source, accept=accept, loads=loads), accepted


async def test_tokenizer_is_read_again_when_most_workers_have_another(tmp_path):
    fleet, folder = View("a"), Folder(tmp_path)
    tokenizers, accepted = tokenizers_of(fleet, lambda _: folder)
    await tokenizers.look_for(MODEL)
    await tokenizers.look_for(MODEL)
    assert (folder.found, len(accepted)) == (["a"], 1)
    fleet.views = View("b", "b", "a").views
    await tokenizers.look_for(MODEL)
    assert (folder.found, len(accepted)) == (["a", "b"], 2)


async def test_tokenizer_is_not_loaded_again_while_it_is_offered(tmp_path):
    """Most workers that are ready have another one, and those refuse requests."""
    fleet, folder = View("a"), Folder(tmp_path)
    tokenizers, accepted = tokenizers_of(fleet, lambda _: folder)
    await tokenizers.look_for(MODEL)
    fleet.ready = View("b", "b", "a").workers
    await tokenizers.look_for(MODEL)
    assert len(accepted) == 1


async def test_silent_workers_of_one_model_delay_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_tokenizers, "LOOK_EVERY_S", 0.01)
    silent, accepted_one = TokenizedModel(("silent",), None), asyncio.Event()

    class Silent:
        async def find(self, offered, others):
            del offered, others
            await asyncio.Event().wait()

    class Late(Folder):
        """Has nothing at the first look."""

        async def find(self, offered, others):
            found = await super().find(offered, others)
            if len(self.found) == 1:
                raise ConfigError("none yet")
            return found

    late = Late(tmp_path)
    tokenizers = WorkerTokenizers(
        models=(silent, MODEL),
        fleet=View("a"),
        source=lambda model: Silent() if model is silent else late,
        accept=lambda *_: accepted_one.set(),
        loads=TokenizerLoads(clock=ServiceClock()),
    )
    looking = asyncio.create_task(tokenizers.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await accepted_one.wait()
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def test_token_ids_for_an_alias_go_to_the_model_before_its_tokenizer():
    reading = RequestReading(models={}, awaited={"m": "m", "alias": "m"})
    assert [reading.own_name(name) for name in ("alias", "m", "other")] == ["m", "m", "other"]
