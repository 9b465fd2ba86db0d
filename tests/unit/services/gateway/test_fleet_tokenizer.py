"""The tokenizer that workers send to a gateway: chosen by digest, received in parts, verified, kept."""

import contextlib
import os
import stat
import tempfile
from dataclasses import replace

import msgspec
import pytest

from tandem_engine.base.errors import CheckpointError, ConfigError, WireError
from tandem_engine.config.transfer import Role
from tandem_engine.tokenizer import bundle as bundles
from tandem_engine.tokenizer.bundle import TokenizerBundle
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.sockets import free_port
from tandem_services.gateway.models import fleet_tokenizer
from tandem_services.gateway.models.fleet_tokenizer import (
    FleetTokenizer,
    TokenizerMissingError,
    preferred,
    received,
)
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoadError, TokenizerLoads
from tandem_testing.gateway_builders import EngineRack
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.router_builders import make_view
from tandem_testing.service_clock import ServiceClock
from tandem_testing.tokenizer_builders import write_tokenizer

ONE, OTHER = "1" * 32, "2" * 32


class Copy:
    """A copy in Redis, or its absence."""

    def __init__(self, bundle: TokenizerBundle | None = None, error: Exception | None = None) -> None:
        self.bundle, self.error = bundle, error
        self.kept: list[str] = []

    async def read(self) -> TokenizerBundle | None:
        if self.error is not None:
            raise self.error
        return self.bundle

    async def keep(self, digest, read) -> None:
        assert read().digest == digest
        self.kept.append(digest)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def bundle(tmp_path) -> TokenizerBundle:
    folder = write_tokenizer(tmp_path)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return TokenizerBundle.read(folder)


@pytest.fixture
def engine(bundle):
    with EngineRack() as rack:
        engine = rack.add("w", MockBehavior(token=hash_tokens(3, 250)))
        engine.tokenizer = bundle
        engine.rack = rack
        yield engine


def source(engine, copy: Copy | None = None) -> FleetTokenizer:
    loads = TokenizerLoads(clock=ServiceClock())
    return FleetTokenizer(model="mock", context=engine.rack.context, copy=copy or Copy(), loads=loads)


def worker(name: str, tokenizer: str, model: str = "mini"):
    return make_view(name, tokenizer=tokenizer, model=model)


def test_tokenizer_of_most_workers_is_preferred():
    workers = [worker("a", ONE), worker("b", OTHER), worker("c", OTHER), worker("d", ""), worker("e", ONE, "else")]
    assert preferred(workers, "mini") == OTHER
    assert preferred(workers, "mini", current=ONE) == OTHER
    assert preferred(workers[:2], "mini", current=ONE) == ONE, "a tie changes nothing"
    assert preferred([worker("d", "")], "mini", current=ONE) == ONE
    assert preferred([], "mini") == ""


def test_tokenizer_without_decode_workers_is_not_preferred():
    prefill = [make_view(name, Role.PREFILL, tokenizer=OTHER) for name in ("a", "b", "c")]
    serving = [make_view("d", Role.PREFILL, tokenizer=ONE), make_view("e", Role.DECODE, tokenizer=ONE)]
    assert preferred([*prefill, *serving], "mini", current=ONE) == ONE
    assert preferred([*prefill, *serving], "mini") == ONE
    assert preferred([*prefill, *serving, make_view("f", Role.DECODE, tokenizer=OTHER)], "mini", current=ONE) == OTHER
    assert preferred(prefill, "mini") == OTHER


async def test_workers_that_do_not_answer_delay_no_gateway_for_long(engine, bundle, monkeypatch):
    monkeypatch.setattr(fleet_tokenizer, "PART_S", 0.05)
    with EngineRack() as rack:
        for name in ("a", "b"):
            deaf = rack.add(name, MockBehavior(token=hash_tokens(3, 250), deaf=True))
            deaf.tokenizer = bundle
        silent = [deaf.view for deaf in rack.engines]
        attempts = 0
        while True:
            attempts += 1
            with contextlib.suppress(TokenizerMissingError):
                found = await source(engine).find([*silent, engine.view], [])
                break
            assert attempts < 100, "always the same two are asked"
    assert found.digest == bundle.digest


async def test_worker_that_is_not_offered_is_asked_last(engine, bundle):
    gone = replace(engine.view, worker_id="gone", incarnation="gone@1", request_endpoint="tcp://")
    asked = [list(source(engine)._asked(bundle.digest, [engine.view], [gone, engine.view])) for _ in range(8)]
    assert asked == [[engine.view, gone]] * 8


async def test_worker_sends_its_tokenizer_in_parts(engine, bundle, monkeypatch):
    for module in (bundles, fleet_tokenizer):
        monkeypatch.setattr(module, "PART_BYTES", 1000)
    assert len(bundle.data) > 2000
    assert await received(engine.view, engine.rack.context) == bundle


async def test_worker_without_what_it_reports_is_refused(engine, bundle, tmp_path):
    with pytest.raises(CheckpointError, match="does not have"):
        await received(replace(engine.view, tokenizer=ONE), engine.rack.context)
    # One that sends other files under this digest.
    engine.tokenizer = TokenizerBundle(bundle.data.replace(b"im_end", b"im_END", 1), bundle.digest)
    with pytest.raises(CheckpointError, match="not the one with digest"):
        await received(engine.view, engine.rack.context)
    with pytest.raises(WireError):
        await received(replace(engine.view, request_endpoint="tcp://"), engine.rack.context)


async def test_silent_worker_is_given_up(engine, monkeypatch):
    monkeypatch.setattr(fleet_tokenizer, "PART_S", 0.05)
    engine.behavior.deaf = True
    with pytest.raises(TimeoutError):
        await received(engine.view, engine.rack.context)


async def test_killed_worker_is_given_up_at_once(engine, monkeypatch):
    monkeypatch.setattr(fleet_tokenizer, "PART_S", 600.0)
    with pytest.raises(CheckpointError, match="connection to it is lost"):
        await received(replace(engine.view, request_endpoint=f"tcp://127.0.0.1:{free_port()}"), engine.rack.context)


async def test_found_tokenizer_is_kept_for_this_user_alone(engine, bundle):
    found = await source(engine).find([engine.view], [])
    assert TokenizerBundle.read(found.folder) == bundle
    assert stat.S_IMODE(found.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(found.folder.parent.stat().st_mode) == 0o700
    engine.tokenizer = None
    view = replace(engine.view, tokenizer=bundle.digest)
    assert (await source(engine).find([view], [])).folder == found.folder, "from the folder"
    (found.folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerMissingError, match="does not have"):
        await source(engine).find([view], [])


async def test_tokenizer_that_failed_to_load_is_not_fetched(engine, bundle, tmp_path):
    fleet = source(engine, Copy(bundle))
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerLoadError):
        await fleet.loads.load("mock", bundle.digest, tmp_path)
    for views in ([engine.view], []):
        with pytest.raises(TokenizerLoadError, match="not a usable tokenizer"):
            await fleet.find(views, [])
    fleet.loads.clock.advance(10.0)
    assert (await fleet.find([engine.view], [])).digest == bundle.digest


async def test_standby_worker_is_used_when_none_is_offered(engine, bundle):
    assert (await source(engine).find([], [engine.view])).digest == bundle.digest


async def test_copy_is_used_when_workers_send_nothing(engine, bundle, monkeypatch):
    assert (await source(engine, Copy(bundle)).find([], [])).digest == bundle.digest
    monkeypatch.setattr(fleet_tokenizer, "_cached", lambda _: None)
    engine.tokenizer = None
    view = replace(engine.view, tokenizer=bundle.digest)
    assert (await source(engine, Copy(bundle)).find([view], [])).digest == bundle.digest


async def test_copy_of_former_workers_is_not_used(engine, bundle):
    view = replace(engine.view, tokenizer=ONE)
    with pytest.raises(TokenizerMissingError, match="waiting for a worker to send the tokenizer of model mock"):
        await source(engine, Copy(bundle)).find([view], [])


@pytest.mark.parametrize("copy", [Copy(), Copy(error=RedisUnavailableError("away"))], ids=["none", "away"])
async def test_missing_tokenizer_is_explained(engine, copy):
    with pytest.raises(TokenizerMissingError, match="of model mock: none is registered"):
        await source(engine, copy).find([], [])
    with pytest.raises(TokenizerMissingError, match="none to send: update them"):
        await source(engine, copy).find([replace(engine.view, tokenizer="")], [])


async def test_folder_that_cannot_be_written_is_named(engine, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(ConfigError, match="cannot keep the tokenizer of model mock below /proc/nowhere"):
        await source(engine).find([engine.view], [])


async def test_copy_is_written_from_the_folder(engine, bundle):
    copy = Copy()
    found = await source(engine, copy).find([engine.view], [])
    await source(engine, copy).keep_copy(found.digest)
    assert copy.kept == [bundle.digest]
    with pytest.raises(CheckpointError, match="not in the folder"):
        await source(engine, copy).keep_copy(ONE)


async def test_folder_of_tokenizers_is_bounded(engine, bundle, monkeypatch):
    root = (await source(engine).find([engine.view], [])).folder.parent
    monkeypatch.setattr(fleet_tokenizer, "MAX_CACHE_BYTES", len(bundle.data) + 100)
    files = {**bundle.files(), "config.json": b'{"a": 1}'}
    newer = TokenizerBundle(*_packed(files))
    fleet_tokenizer._keep(newer)
    assert [each.name for each in root.iterdir()] == [newer.digest]


async def test_kept_folder_is_not_removed_while_it_is_read(bundle):
    """Two models of one tokenizer are opened at a time."""
    first = fleet_tokenizer._keep(bundle)
    with (first.folder / "tokenizer.json").open("rb") as reading:
        assert fleet_tokenizer._keep(bundle) == first
        assert os.fstat(reading.fileno()).st_nlink == 1, "it is still there"
    (first.folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert TokenizerBundle.read(fleet_tokenizer._keep(bundle).folder) == bundle


async def test_folder_of_a_killed_process_is_removed(bundle):
    root = fleet_tokenizer._keep(bundle).folder.parent
    left, fresh = root / ".left", root / ".fresh"
    for folder in (left, fresh):
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(b"{")
    os.utime(left, (0, 0))
    fleet_tokenizer._keep(bundle)
    assert {each.name for each in root.iterdir()} == {bundle.digest, ".fresh"}


def _packed(files) -> tuple[bytes, str]:
    data = msgspec.msgpack.encode(dict(sorted(files.items())))
    return data, bundles.digest_of(data)
