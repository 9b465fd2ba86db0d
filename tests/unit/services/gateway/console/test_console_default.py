"""Where the console is served without a flag: only where something guards what it shows."""

from pathlib import Path
from typing import Any

import pytest

from tandem_testing.gateway_builders import config_of


def served(**fields: Any) -> bool:
    return config_of(**fields).serves_console


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_console_on_loopback_is_served_by_default(host):
    assert served(host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gateway", ""])
def test_console_on_a_network_needs_keys_or_an_admin_port(host):
    assert not served(host=host)
    assert served(host=host, api_keys=Path("keys.json"))
    assert served(host=host, admin_port=9090)


def test_console_flag_overrides_the_default():
    assert served(host="0.0.0.0", console=True)
    assert not served(host="127.0.0.1", admin_port=9090, console=False)
