"""Tokenizers that cannot be loaded are parsed again after pauses that grow, and at once when they change."""

from itertools import pairwise
from pathlib import Path

import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.models import tokenizer_loads
from tandem_services.gateway.models.tokenizer_loads import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    TokenizerLoadError,
    TokenizerLoads,
)
from tandem_testing.service_clock import ServiceClock
from tandem_testing.tokenizer_builders import write_tokenizer


class RustPanicError(BaseException):
    """As a tokenizer in Rust raises it."""


class Parser:
    """Stands for `TextTokenizer.load`, and raises `error`, if there is one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.calls = 0

    def load(self, folder: Path) -> str:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return folder.name


@pytest.fixture
def parser(monkeypatch) -> Parser:
    parser = Parser(CheckpointError("tokenizer.json is not usable"))
    monkeypatch.setattr(tokenizer_loads, "TextTokenizer", parser)
    return parser


@pytest.fixture
def loads() -> TokenizerLoads:
    return TokenizerLoads(clock=ServiceClock())


async def fails(loads: TokenizerLoads, version: str = "a", model: str = "m") -> str:
    with pytest.raises(TokenizerLoadError) as caught:
        await loads.load(model, version, Path("folder"))
    return str(caught.value)


async def test_broken_tokenizer_is_parsed_after_doubling_pauses(loads, parser):
    parsed_at = []
    for second in range(2000):
        before = parser.calls
        assert await fails(loads) == "tokenizer.json is not usable", "one reason, which is logged once"
        parsed_at += [second] * (parser.calls - before)
        loads.clock.advance(1.0)
    pauses = [later - earlier for earlier, later in pairwise(parsed_at)]
    assert pauses[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert max(pauses) == MAX_PAUSE_S == pauses[-1]


async def test_changed_tokenizer_is_loaded_at_once(loads, parser):
    await fails(loads)
    parser.error = None
    await fails(loads)
    loads.check("m", "b")
    assert await loads.load("m", "b", Path("folder")) == "folder"
    assert await loads.load("m", "a", Path("folder")) == "folder", "the former failure is forgotten"


async def test_failure_of_another_version_begins_with_the_first_pause(loads, parser):
    for _ in range(5):
        await fails(loads)
        loads.clock.advance(MAX_PAUSE_S)
    await fails(loads, "b")
    calls = parser.calls
    loads.clock.advance(FIRST_PAUSE_S)
    await fails(loads, "b")
    assert parser.calls == calls + 1


async def test_models_do_not_wait_for_each_other(loads, parser):
    await fails(loads, model="m")
    await fails(loads, model="other")
    assert parser.calls == 2


async def test_failures_are_counted_and_bounded(parser, monkeypatch):
    monkeypatch.setattr(tokenizer_loads, "MAX_FAILURES", 2)
    failed: list[str] = []
    loads = TokenizerLoads(clock=ServiceClock(), on_failure=failed.append)
    for model in ("a", "b", "b", "c", "a"):
        await fails(loads, model=model)
    assert failed == ["a", "b", "c", "a"], "the oldest is forgotten, and parsed again"


async def test_panic_of_a_tokenizer_is_a_failure_like_others(loads, parser):
    parser.error = RustPanicError("index out of bounds")
    assert "RustPanicError: index out of bounds" in await fails(loads)
    await fails(loads)
    assert parser.calls == 1


async def test_files_that_change_are_another_version(loads, tmp_path):
    folder = write_tokenizer(tmp_path / "model")
    good = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(TokenizerLoadError, match="is not a usable tokenizer"):
            await loads.load_folder("m", folder)
    (folder / "tokenizer.json").write_text(good)
    assert isinstance(await loads.load_folder("m", folder), TextTokenizer)
