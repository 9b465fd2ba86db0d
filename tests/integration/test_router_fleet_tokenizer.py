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

from tandem_engine.tokenizer.bundle import TokenizerBundle
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.sockets import free_port
from tandem_services.router_server.config import TokenizedModel
from tandem_services.router_server.worker_tokenizers import WorkerTokenizers
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.mock_engine import MockBehaviour, hash_tokens
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.router_builders import Fleet, make_record
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
    """The first with this status. `beat`: of the workers, meanwhile."""
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
                engine = rack.add("w", MockBehaviour(token=hash_tokens(3, 250)))
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


async def test_tokenizer_is_read_again_when_most_workers_have_another(tmp_path):
    found, accepted, fleet = [], [], View("a")

    class Folder:
        async def find(self, offered, others):
            del others
            found.append(offered[0].tokenizer)
            return type("Found", (), {"digest": offered[0].tokenizer, "folder": write_tokenizer(tmp_path)})

    tokenizers = WorkerTokenizers(
        models=[TokenizedModel(("m",), None)],
        fleet=fleet,
        source=lambda _: Folder(),
        accept=lambda model, tokenizer: accepted.append((model.names, tokenizer.vocab_size)),
    )
    await tokenizers.look()
    await tokenizers.look()
    assert (found, len(accepted)) == (["a"], 1)
    fleet.views = View("b", "b", "a").views
    await tokenizers.look()
    assert (found, len(accepted)) == (["a", "b"], 2)
