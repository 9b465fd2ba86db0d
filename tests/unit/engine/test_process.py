"""The engine process: how errors end it."""

import logging
from pathlib import Path

import pytest

from tandem_engine.config import EngineConfig
from tandem_engine.engine import process as serving
from tandem_engine.engine.process import UNEXPECTED_ERROR, ProcessConfig, serve


@pytest.fixture
def config(tmp_path: Path) -> ProcessConfig:
    return ProcessConfig(
        engine=EngineConfig(model_path=str(tmp_path)),
        worker_id="w",
        incarnation="w@1",
        host="127.0.0.1",
        request_port=0,
        peer_port=0,
        control=None,
        curve_keys=None,
    )


@pytest.fixture(autouse=True)
def outlive_the_parent(monkeypatch) -> None:
    monkeypatch.setattr(serving, "die_with_parent", lambda: None)


def test_unexpected_error_is_logged_and_sets_exit_status(monkeypatch, caplog, config):
    def broken(*_: object) -> None:
        raise AssertionError("page 7 given back while free")

    monkeypatch.setattr(serving, "_serve", broken)
    with caplog.at_level(logging.ERROR):
        assert serve(config) == UNEXPECTED_ERROR
    assert "page 7 given back while free" in caplog.text


def test_engine_that_cannot_start_reports_reason_and_exits(caplog, config):
    with caplog.at_level(logging.ERROR):
        assert serve(config) == 3
    assert config.engine.model_path in caplog.text
