"""A gateway without files of its model (`--model fleet`): workers send the tokenizer, and Redis has a copy."""

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tandem_engine.tokenizer.bundle import TokenizerBundle
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.common.sockets import free_port
from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.fleets import OpenFleets
from tandem_services.gateway.models import fleet_tokenizer, tokenizer_loads
from tandem_services.gateway.models.fleet_tokenizer import TokenizerMissingError
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoadError, TokenizerLoads
from tandem_services.router import shared_state
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import Keys
from tandem_services.router.shared_state import TokenizerCopy
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.mock_engine import MockBehavior, MockEngine, hash_tokens
from tandem_testing.redis_server import REDIS_SERVER
from tandem_testing.router_builders import Fleet, make_record
from tandem_testing.service_clock import ServiceClock
from tandem_testing.system import System, tandem_command
from tandem_testing.tokenizer_builders import write_tokenizer
from tandem_testing.waiting import until, wait_for

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")

PATIENCE_S = 120.0
SECRET = Deployment(b"k" * 32)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def bundle_in(folder: Path, config: str = "{}", specials: tuple[str, ...] = ()) -> TokenizerBundle:
    folder.mkdir(exist_ok=True)
    checkpoint = write_tokenizer(folder, specials=specials)
    (checkpoint / "config.json").write_text(config, encoding="utf-8")
    return TokenizerBundle.read(checkpoint)


@pytest.fixture
def bundle(tmp_path) -> TokenizerBundle:
    return bundle_in(tmp_path / "model")


@pytest.fixture
def model(server) -> ModelConfig:
    server.wipe()
    return ModelConfig(path=None, names=("m",), cluster="live", redis=RedisAddress(url=server.url))


@pytest.fixture
def rack() -> Iterator[EngineRack]:
    with EngineRack() as rack:
        yield rack


def engine_of(rack: EngineRack, name: str, bundle: TokenizerBundle) -> MockEngine:
    engine = rack.add(name, MockBehavior(token=hash_tokens(3, 250)))
    engine.model, engine.tokenizer = "m", bundle
    return engine


async def beat(workers: Fleet, *engines: MockEngine) -> None:
    for engine in engines:
        await workers.beat(replace(make_record(engine.worker_id), view=engine.view))


def copy_of(model: ModelConfig, deployment: Deployment = Deployment()) -> TokenizerCopy:  # noqa: B008  frozen
    keys = Keys(model.cluster, deployment.namespace)
    return TokenizerCopy(redis=model.redis, keys=keys, deployment=deployment, model=model.name)


@contextlib.asynccontextmanager
async def client_of(model: ModelConfig) -> AsyncIterator[RedisClient]:
    client = RedisClient(model.redis, timeout_s=PATIENCE_S)
    try:
        yield client
    finally:
        await client.close()


async def test_tokenizer_copy_is_read_back_and_expires(model, bundle):
    copy = copy_of(model)
    assert await copy.read() is None
    await copy.keep(bundle.digest, lambda: bundle)
    assert await copy.read() == bundle
    key = copy.keys.tokenizer("m")
    async with client_of(model) as redis:
        stored = await redis.command("GET", key)
        assert len(stored) < len(bundle.data)
        await redis.command("PEXPIRE", key, 1000_000)
        await copy.keep(bundle.digest, lambda: pytest.fail("it is there"))
        assert await redis.command("PTTL", key) > 1000_000
        # A value of another type is overwritten.
        await redis.command("UNLINK", key)
        await redis.command("SADD", key, "x")
        await copy.keep(bundle.digest, lambda: bundle)
        assert await copy.read() == bundle


async def test_copy_of_another_deployment_does_not_count(model, bundle):
    ours, theirs = copy_of(model, SECRET), replace(copy_of(model), keys=Keys("live", SECRET.namespace))
    await theirs.keep(bundle.digest, lambda: bundle)
    assert await theirs.read() == bundle
    assert await ours.read() is None
    other = replace(copy_of(model, SECRET), model="other", keys=ours.keys)
    await ours.keep(bundle.digest, lambda: bundle)
    async with client_of(model) as redis:
        stolen = await redis.command("GET", ours.keys.tokenizer("m"))
        await redis.command("SET", ours.keys.tokenizer("other"), stolen)
    assert await other.read() is None, "signed for another model"


async def test_altered_copy_is_ignored(model, bundle, monkeypatch):
    copy = copy_of(model, SECRET)
    await copy.keep(bundle.digest, lambda: bundle)
    monkeypatch.setattr(shared_state, "MAX_BUNDLE_BYTES", 10 - shared_state.PART_BYTES)
    assert await copy.read() is None, "more than is decompressed"
    monkeypatch.undo()
    monkeypatch.setattr(shared_state, "MAX_COPY_BYTES", 100 - shared_state.MAX_COPY_HEADER_BYTES)
    assert await copy.read() is None, "more than is read"
    monkeypatch.undo()
    async with client_of(model) as redis:
        key = copy.keys.tokenizer("m")
        stored = await redis.command("GET", key)
        for altered in (stored[:-20], stored[:-1] + b"\0", b"", b"\xc1", stored + b"x"):
            await redis.command("SET", key, altered)
            assert await copy.read() is None


async def test_altered_copy_is_written_again(model, bundle):
    copy = copy_of(model, SECRET)
    await copy.keep(bundle.digest, lambda: bundle)
    async with client_of(model) as redis:
        key = copy.keys.tokenizer("m")
        stored = await redis.command("GET", key)
        await redis.command("SET", key, stored[:-1] + bytes([stored[-1] ^ 1]))
    await copy.keep(bundle.digest, lambda: bundle)
    assert await copy.read() == bundle


async def test_large_tokenizer_has_no_copy(model, bundle, monkeypatch, caplog):
    monkeypatch.setattr(shared_state, "MAX_COPY_BYTES", 10)
    copy = copy_of(model)
    for _ in range(2):
        await copy.keep(bundle.digest, lambda: bundle)
    assert await copy.read() is None
    assert caplog.text.count("more than the 10 that are kept") == 1


async def test_opened_fleet_has_the_tokenizer_of_its_workers(server, model, rack, bundle, tmp_path):
    other = bundle_in(tmp_path / "other", specials=("<|other|>",))
    one, two, three = (engine_of(rack, n, b) for n, b in (("one", bundle), ("two", other), ("three", other)))
    fleets = OpenFleets()
    with pytest.raises(TokenizerMissingError, match="none is registered"):
        await fleets.open(model)
    async with Fleet.of(server, cluster="live") as workers:
        await beat(workers, one)
        fleet = await fleets.open(model)
        assert fleet.tokenizer == bundle.digest
        assert [view.worker_id for view in fleet.router.offered()] == ["one"]
        await beat(workers, one, two)
        await fleet.router.refresh()
        assert {view.worker_id for view in fleet.router.workers()} == {"one", "two"}, "a canary may name it"
        assert [view.worker_id for view in fleet.router.offered()] == ["one"], "it would read other text"
        assert not fleet.outdated
        await beat(workers, one, two, three)
        await fleet.router.refresh()
        assert fleet.outdated
        again = await fleets.open(model)
        assert again.tokenizer == other.digest
        assert {view.worker_id for view in again.router.offered()} == {"two", "three"}
    await fleets.close_all()


async def test_broken_tokenizer_is_parsed_once_until_it_changes(server, model, rack, bundle, tmp_path, monkeypatch):
    folder = tmp_path / "broken"
    bundle_in(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    broken = TokenizerBundle.read(folder)
    one, two, three = (engine_of(rack, n, b) for n, b in (("one", broken), ("two", bundle), ("three", bundle)))
    parsed: list[Path] = []
    load = tokenizer_loads.TextTokenizer.load
    monkeypatch.setattr(tokenizer_loads.TextTokenizer, "load", lambda folder: parsed.append(folder) or load(folder))
    fleets = OpenFleets(loads=TokenizerLoads(clock=ServiceClock()))
    async with Fleet.of(server, cluster="live") as workers:
        await beat(workers, one)
        for _ in range(3):
            with pytest.raises(TokenizerLoadError, match="not a usable tokenizer"):
                await fleets.open(model)
        assert len(parsed) == 1
        await beat(workers, one, two, three)
        assert (await fleets.open(model)).tokenizer == bundle.digest
    await fleets.close_all()


async def test_workers_of_equal_encoding_share_requests(server, model, rack, bundle, tmp_path):
    """A revision of other weights: its config.json differs, its ids do not."""
    later = bundle_in(tmp_path / "later", '{"transformers_version": "5"}')
    assert (later.digest == bundle.digest, later.encoding == bundle.encoding) == (False, True)
    one, two, three = (engine_of(rack, n, b) for n, b in (("one", bundle), ("two", later), ("three", later)))
    fleets = OpenFleets()
    async with Fleet.of(server, cluster="live") as workers:
        await beat(workers, one)
        former = await fleets.open(model)
        await beat(workers, one, two, three)
        await former.router.refresh()
        assert {view.worker_id for view in former.router.offered()} == {"one", "two", "three"}
        assert former.outdated, "templates and settings are those of most workers"
        again = await fleets.open(model)
        assert again.tokenizer == later.digest
        assert {view.worker_id for view in again.router.offered()} == {"one", "two", "three"}
    await fleets.close_all()


async def test_fleet_opens_again_without_workers(server, model, rack, bundle, monkeypatch):
    engine = engine_of(rack, "one", bundle)
    fleets = OpenFleets()
    async with Fleet.of(server, cluster="live") as workers:
        await beat(workers, engine)
        fleet = await fleets.open(model)
        upkeep = asyncio.create_task(fleet.parts.upkeep())
        copy = copy_of(model)

        async def copied() -> bool:
            return await copy.read() == bundle

        await until(copied, PATIENCE_S, "the copy is in Redis")
        upkeep.cancel()
        await asyncio.gather(upkeep, return_exceptions=True)
        await fleets.close_all()
        await workers.registry.deregister(engine.view.incarnation)
    monkeypatch.setattr(fleet_tokenizer, "_cached", lambda _: None)
    fleet = await fleets.open(model)
    assert fleet.tokenizer == bundle.digest
    assert fleet.router.workers() == ()
    await fleets.close_all()


@contextlib.contextmanager
def gateway(log: Path, redis_url: str, *flags: str) -> Iterator[str]:
    """The address of a process that has no files of its model."""
    port = free_port()
    command = tandem_command("gateway", "--model", "fleet", "--port", str(port), "--redis-url", redis_url, *flags)
    folder = Path(tempfile.mkdtemp())
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**_environment(), "TMPDIR": str(folder)}
        )
    try:
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in log.read_text()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}


def reasons(url: str) -> list[str] | None:
    with contextlib.suppress(httpx.TransportError):
        return list(httpx.get(f"{url}/ready", timeout=PATIENCE_S).json().get("reasons", []))
    return None


@pytest.mark.slow
def test_gateway_serves_a_real_worker_and_restarts_at_zero(tmp_path):
    flags = ("--threads", "1", "--kv-cache-gib", "0.1", "--dtype", "float32")
    system = System.start(tmp_path / "system", "--prefill", "0", "--decode", "0", "--both", "1", *flags)
    log = tmp_path / "gateway.log"
    try:
        process = next(each for each in system.processes() if "gateway" in each.argv)
        redis_url = process.flag("--redis-url")
        same = [*("--served-model-name", "tandem-mini"), *("--cluster", process.flag("--cluster") or "default")]
        for flag in ("--redis-password-file", "--curve-keys"):
            same += [flag, value] if (value := process.flag(flag)) is not None else []
        body = {
            **{"model": "tandem-mini", "max_tokens": 12, "temperature": 0},
            "messages": [{"role": "user", "content": "Write a story about a fox."}],
        }
        expected = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()["choices"]
        with gateway(log, redis_url, *same) as url:
            wait_for(lambda: reasons(url) == [], PATIENCE_S, log.read_text)
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["choices"] == expected
            wait_for(lambda: "wrote the tokenizer" in log.read_text(), PATIENCE_S, log.read_text)
        with system.no_restarts():
            for each in system.processes():
                if "worker" in each.argv:
                    system.kill(each.pid)
            with gateway(log, redis_url, *same, "--from-zero-timeout", "1") as url:
                wait_for(lambda: reasons(url) == [], PATIENCE_S, log.read_text)
                wait_for(lambda: "from Redis: no worker" in log.read_text(), PATIENCE_S, log.read_text)
                held = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
                assert held.status_code == 503, held.text
                assert "not served yet" not in held.text, "it has the tokenizer, and waits for a worker"
                text = {"model": "tandem-mini", "prompt": "a fox"}
                assert httpx.post(f"{url}/tokenize", json=text, timeout=PATIENCE_S).json()["count"] > 0
    finally:
        system.close()
