import logging
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.common.settings import read_settings


def test_boolean_setting_accepts_only_on_and_off_values():
    assert read_settings({"TANDEM_STANDBY": "1"}).standby
    assert not read_settings({"TANDEM_STANDBY": "0"}).standby
    assert read_settings({"TANDEM_STANDBY": "true"}).standby
    with pytest.raises(ConfigError, match="TANDEM_STANDBY must be true or false, got 'yes'"):
        read_settings({"TANDEM_STANDBY": "yes"})


def test_defaults_without_any_variable():
    settings = read_settings({})
    assert (settings.redis_url, settings.cluster, settings.warnings) == (None, "default", ())


def test_variables_are_read_and_empty_ones_are_not_there():
    settings = read_settings(
        {
            "TANDEM_REDIS_URL": "redis://h",
            "TANDEM_REDIS_PASSWORD_FILE": "/run/secret",
            "TANDEM_CLUSTER": "",
            "TANDEM_LOG_LEVEL": "DEBUG",
            "HOME": "/x",
        }
    )
    assert settings.redis_url == "redis://h"
    assert settings.redis_password_file == Path("/run/secret")
    assert settings.cluster == "default"
    assert settings.log_level == logging.DEBUG


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({"TANDEM_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "ours"),
        ({"TANDEM_API_KEY": "", "OPENAI_API_KEY": "theirs"}, "theirs"),
        ({"OPENAI_API_KEY": ""}, None),
    ],
)
def test_key_is_taken_from_our_variable_first_and_never_shown(variables, key):
    settings = read_settings(variables)
    assert (settings.api_key, settings.warnings) == (key, ())
    assert "ours" not in repr(settings)
    assert "theirs" not in repr(settings)


def test_misspelt_variable_is_reported_with_the_nearest_name():  # [config-refused]
    (warning,) = read_settings({"TANDEM_REDIS_URI": "redis://h"}).warnings
    assert "TANDEM_REDIS_URI" in warning
    assert "did you mean TANDEM_REDIS_URL?" in warning


def test_log_level_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="TANDEM_LOG_LEVEL must be one of debug, info, warning, error"):
        read_settings({"TANDEM_LOG_LEVEL": "loud"})


def test_unlike_variable_is_reported_with_all_names():
    (warning,) = read_settings({"TANDEM_ZZZZZZZZ": "1"}).warnings
    assert "TANDEM_CURVE_KEYS" in warning


def test_kubernetes_service_variables_cause_no_warnings():
    settings = read_settings(
        {
            "TANDEM_GATEWAY_SERVICE_HOST": "10.0.0.1",
            "TANDEM_GATEWAY_SERVICE_PORT": "80",
            "TANDEM_GATEWAY_SERVICE_PORT_HTTP": "80",
            "TANDEM_GATEWAY_PORT": "tcp://10.0.0.1:80",
            "TANDEM_GATEWAY_PORT_80_TCP": "tcp://10.0.0.1:80",
            "TANDEM_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
        }
    )
    assert settings.warnings == ()
