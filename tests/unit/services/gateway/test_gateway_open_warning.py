"""A gateway without API keys warns about its open access."""

import logging
from pathlib import Path

import pytest

from tandem_services.gateway.serve import _warn_open_access
from tandem_testing.gateway_builders import config_of


@pytest.mark.parametrize(
    ("config", "warnings"),
    [
        ({"host": "0.0.0.0"}, ["port 8000 on any address of this machine can use"]),
        ({"host": "::"}, ["port 8000 on any address of this machine can use"]),
        ({"host": "10.0.0.5", "port": 8001}, ["port 8001 on 10.0.0.5 can use"]),
        ({"host": "::", "admin_host": "::", "admin_port": 9090}, ["any address", "--admin-port 9090 can read metrics"]),
        ({"host": "127.0.0.1"}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0", "api_keys": Path("keys.json")}, []),
    ],
)
def test_gateway_without_keys_logs_open_access_warnings(config, warnings, caplog) -> None:
    with caplog.at_level(logging.INFO):
        _warn_open_access(config_of(**config))
    output = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("tandem") and record.levelno == logging.WARNING
    ]
    assert len(output) == len(warnings)
    assert all(part in message for part, message in zip(warnings, output, strict=True))
    assert all("--api-keys" in message for message in output)
