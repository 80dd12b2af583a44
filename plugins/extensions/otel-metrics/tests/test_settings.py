"""A setting that is wrong is refused before the start, with its name and the remedy, and without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dynamo_core.errors import ConfigError
from dynamo_plugin_extension_otel_metrics.extension import OtelMetricsExtension
from dynamo_plugin_extension_otel_metrics.settings import OtelMetricsConfig, check_environment
from dynamo_testing import ExtensionHost
from pydantic import ValidationError

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("endpoint", "asked"),
    [
        ("http://collector:4318", "http://collector:4318/v1/metrics"),
        ("https://collector/otlp/", "https://collector/otlp/v1/metrics"),
        ("http://collector:4318/v1/metrics", "http://collector:4318/v1/metrics"),
    ],
)
def test_the_path_of_metrics_is_added_once(endpoint: str, asked: str) -> None:
    assert OtelMetricsConfig(endpoint=endpoint).endpoint == asked


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"endpoint": "collector:4317"}, "is not an address such as http://127.0.0.1:4318"),
        ({"endpoint": "http://"}, "is not an address such as http://127.0.0.1:4318"),
        ({"endpoint": "http://collector:none"}, "is not an address such as http://127.0.0.1:4318"),
        ({"endpoint": f"http://me:{SECRET}@collector"}, "set the variable OTEL_EXPORTER_OTLP_HEADERS"),
        ({"endpoint": f"http://collector?key={SECRET}"}, "set the variable OTEL_EXPORTER_OTLP_HEADERS"),
        ({"interval": 0}, "greater than or equal to 0.1"),
        ({"interval": "often"}, "valid number"),
        ({"headers": {"authorization": SECRET}}, "not permitted"),
    ],
)
def test_a_key_that_is_wrong_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        OtelMetricsConfig(**keys)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "a number of seconds above 0"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "nan", "a number of seconds above 0"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "none, gzip or deflate"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem", "the path of a file that can be read"),
        ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", "/nowhere/key.pem", "the path of a file that can be read"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "a number of milliseconds above 0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "inf", "a number of milliseconds above 0"),
        ("OTEL_METRIC_EXPORT_TIMEOUT", "-1", "a number of milliseconds above 0"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "deltas", "cumulative, delta or lowmemory"),
        (
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
            "buckets",
            "explicit_bucket_histogram or base2_exponential_bucket_histogram",
        ),
    ],
)
def test_a_variable_that_is_wrong_is_named_with_its_remedy(name: str, value: str, remedy: str) -> None:
    said = f"environment {name}: {value!r} cannot be used; unset it or set it to {remedy}"
    with pytest.raises(ConfigError) as raised:
        check_environment({name: value}, OtelMetricsConfig())

    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", f"collector/{SECRET}"),
        ("OTEL_EXPORTER_OTLP_HEADERS", f"Bearer {SECRET}"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", f"a=b,={SECRET}"),
        ("OTEL_EXPORTER_OTLP_HEADERS", f"api key={SECRET}"),
        ("OTEL_EXPORTER_OTLP_HEADERS", f'key="{SECRET}"'),
    ],
)
def test_a_variable_that_may_hold_a_secret_is_not_shown(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^environment {name}: its value cannot be used; unset it or") as raised:
        check_environment({name: value}, OtelMetricsConfig())

    assert SECRET not in str(raised.value)


def test_variables_with_an_effect_and_a_right_value_pass(tmp_path: Path) -> None:
    certificate = tmp_path / "ca.pem"
    certificate.touch()
    right = {
        # The variable for metrics goes before the one for everything.
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, tenant = a=b,,empty=",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificate),
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "LowMemory",
        "OTEL_METRIC_EXPORT_INTERVAL": "",
    }

    check_environment(right, OtelMetricsConfig())


def test_a_key_makes_its_variable_have_no_effect() -> None:
    wrong = {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317", "OTEL_METRIC_EXPORT_INTERVAL": "never"}

    check_environment(wrong, OtelMetricsConfig(endpoint="http://collector:4318", interval=5))


def test_a_wrong_variable_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "grpc")

    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"):
        ExtensionHost(lambda services: OtelMetricsExtension(OtelMetricsConfig(), services))
