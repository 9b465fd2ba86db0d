"""Flags and variables of tracing, and the errors when they cannot work."""

import builtins

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_services.cli.flags import tracing_argv, tracing_of
from tandem_services.cli.main import build_parser
from tandem_services.common.errors import StartupError
from tandem_services.common.settings import read_settings
from tandem_services.common.span_export import SpanExport
from tandem_services.common.tracing import TracingConfig, require_opentelemetry

GATEWAY = ["gateway", "--redis-url", "redis://h"]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://c/v1/traces", "https://c/v1/traces"),
        ("https://c/tenant/otlp", "https://c/tenant/otlp"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_collector_without_a_path_gets_the_standard_one(endpoint, url):
    assert TracingConfig(endpoint=endpoint).url == url


@pytest.mark.parametrize(
    "endpoint", ["", "collector:4317", "grpc://collector:4317", "http://", "http://h:99999", "x y"]
)
def test_endpoint_that_is_none_is_named_by_its_flag(endpoint):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        TracingConfig(endpoint=endpoint)


def test_unsupported_otlp_protocol_error_names_supported_one():
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL 'grpc' is not spoken here: set it to http/prot"):
        TracingConfig(endpoint="http://h:4317", protocol="grpc")


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318/"}, "http://h:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, "http://t/x"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
    ],
)
def test_standards_variables_name_the_collector(variables, endpoint):
    assert read_settings(variables).otlp_traces_endpoint == endpoint


@pytest.mark.parametrize(
    ("variables", "off"),
    [
        ({}, False),
        ({"OTEL_SDK_DISABLED": "True"}, True),
        ({"OTEL_SDK_DISABLED": "false"}, False),
        ({"OTEL_TRACES_EXPORTER": "none"}, True),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, False),
    ],
)
def test_standard_otel_variables_disable_tracing(variables, off):
    assert read_settings(variables).otel_switched_off is off


def test_queue_is_bounded_by_the_standards_variable():
    assert read_settings({"OTEL_BSP_MAX_QUEUE_SIZE": "64"}).otel_max_waiting_spans == 64
    for wrong in ("0", "-1", "many"):
        with pytest.raises(ConfigError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
            read_settings({"OTEL_BSP_MAX_QUEUE_SIZE": wrong})


@pytest.mark.parametrize("command", [GATEWAY, ["worker", "--redis-url", "redis://h"], ["up"]])
def test_tracing_flags_of_serving_commands_default_to_off(command, monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert tracing_of(build_parser().parse_args(command)) is None
    flags = ["--otlp-traces-endpoint", "http://h:4318", "--otlp-traces-sample-ratio", "0.25"]
    args = build_parser().parse_args([*command, *flags])
    config = tracing_of(args)
    assert (config.url, config.sample_ratio) == ("http://h:4318/v1/traces", 0.25)
    assert tracing_argv(args) == flags
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing_of(args) is None


def test_otlp_flag_without_packages_names_extra_to_install(monkeypatch):
    real = builtins.__import__

    def without_sdk(name: str, *rest: object) -> object:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_sdk)
    with pytest.raises(StartupError, match=r"--otlp-traces-endpoint needs .* pip install 'tandem-llm\[otel\]'"):
        require_opentelemetry()


def test_resource_attributes_of_the_environment_win(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.instance.id=pod-7")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-llm")
    export = SpanExport(TracingConfig(endpoint="http://127.0.0.1:1"), service="tandem-gateway", instance="g1")
    resource = export.tracer.start_span("never ended").resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("my-llm", "pod-7")
    assert resource["deployment.environment.name"] == "test"
    export.close(within_s=0.0)
