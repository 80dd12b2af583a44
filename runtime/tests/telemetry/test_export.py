from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from dynamo_core.errors import ConfigError
from dynamo_core.spans import start_span
from dynamo_runtime.telemetry.export import configure_export, export_enabled, shutdown_export


@pytest.mark.parametrize("value", ["1", "true", "TRUE", " yes ", "on"])
def test_the_variable_turns_export_on(value: str) -> None:
    assert export_enabled({"OTEL_EXPORT_ENABLED": value})


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORT_ENABLED": ""},
        {"OTEL_EXPORT_ENABLED": "0"},
        {"OTEL_EXPORT_ENABLED": "false"},
        {"OTEL_EXPORT_ENABLED": "1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"},
    ],
)
def test_export_is_off_by_default(env: dict[str, str]) -> None:
    assert not export_enabled(env)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_EXPORT_ENABLED", "1")
    yield
    shutdown_export()


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "set it to http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "set it to http/protobuf"),
        ("OTEL_TRACES_SAMPLE_RATIO", "half", "from 0 to 1"),
        ("OTEL_TRACES_SAMPLE_RATIO", "1.1", "from 0 to 1"),
        ("OTEL_TRACES_SAMPLE_RATIO", "nan", "from 0 to 1"),
        ("OTEL_TRACES_SAMPLE_RATIO", "-0.1", "from 0 to 1"),
    ],
)
def test_a_variable_that_is_wrong_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=rf"^environment {name}: '{value}' .*{said}$"):
        configure_export("x")

    assert not start_span("a").recording


@pytest.mark.usefixtures("on")
def test_the_protocol_for_traces_goes_before_the_one_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)

    # It got as far as the package.
    with pytest.raises(ConfigError, match="not installed"):
        configure_export("x")


@pytest.mark.usefixtures("on")
def test_a_missing_exporter_is_a_config_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)

    with pytest.raises(ConfigError, match=r'OTEL_EXPORT_ENABLED.*not installed.*pip install "dynamo-runtime\[otlp\]"'):
        configure_export("x")


def test_ending_export_that_never_began_does_nothing() -> None:
    assert shutdown_export()


PROGRAM = """
from dynamo_runtime.telemetry.export import configure_export, shutdown_export
from dynamo_core.spans import start_span

assert configure_export("x")
with start_span("a") as span:
    assert span.recording
print(shutdown_export(0.2), shutdown_export(0.2), start_span("b").recording)
"""


def test_a_collector_that_never_answers_does_not_keep_a_process_from_ending() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = os.environ | {
            "OTEL_EXPORT_ENABLED": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3600",
        }
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, env=env)

    assert (done.returncode, done.stdout.split()) == (0, ["False", "True", "False"])
    assert "the last spans could not be exported within 0.2 s" in done.stderr
