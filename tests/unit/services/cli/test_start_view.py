"""How a start looks on a terminal and in a pipe."""

import io
from dataclasses import replace

import pytest

from tandem_services.cli.start_view import Notices, start_view
from tandem_services.cli.start_watch import Row
from tandem_services.common.service_manager import ServiceManager
from tandem_testing.notify_socket import NotifySocket

ROWS = [
    Row(
        label="decode-0",
        phase="weights",
        doing="weights 61 % of 4.00 GiB",
        share=0.61,
        since_start_s=12.3,
        in_phase_s=3.0,
        ready=False,
    ),
    Row(label="gateway", phase="ready", doing="ready", share=1.0, since_start_s=3.1, in_phase_s=0.0, ready=True),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_on(stream: io.StringIO) -> str:
    with start_view(stream) as view:
        view.show(ROWS, 12.3)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")


def test_terminal_has_a_row_with_a_bar_for_each_process():
    shown = shown_on(Terminal())
    assert "weights 61 % of 4.00 GiB" in shown
    assert "12.3 s" in shown
    assert "━" in shown
    assert "\x1b[" in shown


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")])
def test_pipe_output_has_no_control_codes_in_any_setting(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert shown_on(io.StringIO()).splitlines() == [
        "decode-0: weights 61 % of 4.00 GiB, 12.3 s after the start",
        "ready gateway after 3.1 s",
    ]


def test_dumb_terminal_gets_lines_without_control_codes(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown_on(Terminal())


def test_table_in_twenty_columns_does_not_fail(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert "12" in shown_on(Terminal())


def test_notices_extend_the_start_limit_of_the_manager(tmp_path):
    listener = NotifySocket(tmp_path / "notify")
    try:
        notices = Notices(ServiceManager(address=listener.address))
        for now in (0.0, 0.1, 4.9, 5.0):
            notices.show(ROWS, now)
        notices.show([replace(ROWS[0], phase="memory", doing="memory"), ROWS[1]], 5.1)
        sent = listener.messages()
    finally:
        listener.close()
    assert [message["STATUS"] for message in sent] == [
        "starting: decode-0: weights 61 % of 4.00 GiB",
        "starting: decode-0: weights 61 % of 4.00 GiB",
        "starting: decode-0: memory",
    ]
    assert {message["EXTEND_TIMEOUT_USEC"] for message in sent} == {"60000000"}
