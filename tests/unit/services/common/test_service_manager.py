"""What systemd is notified of."""

import socket

import pytest

from tandem_services.common.service_manager import ServiceManager
from tandem_services.common.settings import read_settings
from tandem_testing.notify_socket import NotifySocket


@pytest.fixture
def listener(tmp_path):
    made = NotifySocket(tmp_path / "notify")
    yield made
    made.close()


def test_notifications_of_one_life_arrive_in_order(listener) -> None:
    manager = ServiceManager(address=listener.address)
    manager.starting("decode-0: weights 61 %", extend_s=60)
    manager.ready("serving")
    manager.status("decode-0 restarted")
    manager.stopping()
    assert listener.messages() == [
        {"EXTEND_TIMEOUT_USEC": "60000000", "STATUS": "decode-0: weights 61 %"},
        {"READY": "1", "STATUS": "serving"},
        {"STATUS": "decode-0 restarted"},
        {"STOPPING": "1", "STATUS": "stopping"},
    ]


def test_status_of_several_lines_is_one_message(listener) -> None:
    ServiceManager(address=listener.address).status("it ended:\n  READY=1\n" + "x" * 10_000)
    [message] = listener.messages()
    assert message.keys() == {"STATUS"}
    assert message["STATUS"].startswith("it ended: READY=1 x")
    assert len(message["STATUS"]) == 500


def test_abstract_name_of_a_socket_is_notified() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        name = listener.getsockname().decode()
        ServiceManager(address=f"@{name[1:]}").ready("serving")
        assert listener.recv(100).startswith(b"READY=1")


def test_missing_service_manager_is_reported_once(tmp_path, caplog) -> None:
    manager = ServiceManager(address=str(tmp_path / "gone"))
    manager.ready("serving")
    manager.stopping()
    [record] = caplog.records
    assert str(tmp_path / "gone") in record.getMessage()


def test_status_without_a_service_manager_is_not_sent(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a socket was opened")

    assert read_settings({}).notify_socket is None
    assert read_settings({"NOTIFY_SOCKET": ""}).notify_socket is None
    assert read_settings({"NOTIFY_SOCKET": "/run/n"}).notify_socket == "/run/n"
    monkeypatch.setattr(socket, "socket", fail)
    ServiceManager(address=None).ready("serving")
