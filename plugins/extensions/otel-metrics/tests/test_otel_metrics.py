"""The extension keeps what extensions promise; a collector gets what the conventions ask for, and delays nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from dynamo_core import RequestFinished
from dynamo_plugin_extension_otel_metrics.extension import OtelMetricsExtension
from dynamo_plugin_extension_otel_metrics.settings import OtelMetricsConfig
from dynamo_testing import ExtensionFactory, ExtensionHost, ExtensionKit
from dynamo_testing.extension.sample_events import MODEL, WORKERS, finished
from dynamo_testing.servers.otlp import METRICS, Histogram, OtlpReceiver, histograms

DURATION, TOKENS = "gen_ai.server.request.duration", "gen_ai.client.token.usage"
FIRST_TOKEN, PER_TOKEN = "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"
NAMES = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "dynamo", "gen_ai.request.model": MODEL}
ANSWERED = NAMES | {"gen_ai.response.model": MODEL}
#: The logger of the SDK's exporter.
SDK_LOG = "opentelemetry.exporter.otlp.proto.http.metric_exporter"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the environment but for what a test adds."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def making(endpoint: str | None, interval: float | None = 3600) -> ExtensionFactory:
    return lambda services: OtelMetricsExtension(OtelMetricsConfig(endpoint=endpoint, interval=interval), services)


async def sent(host: ExtensionHost, receiver: OtlpReceiver, *events: RequestFinished) -> list[Histogram]:
    """Return what the collector gets of these events by the time that the extension is closed."""
    for event in events:
        host.publish(event)
    await host.aclose()
    assert host.failure == ""
    return histograms(receiver.bodies(METRICS)[-1])


def one(rows: Sequence[Histogram], name: str, kind: str | None = None) -> Histogram:
    """Return the only histogram of a name, and of a kind of tokens."""
    (found,) = [row for row in rows if row.name == name and row.attributes.get("gen_ai.token.type") == kind]
    return found


def ended(error: str = "", **changed: Any) -> RequestFinished:
    event = finished("kit-request", error)
    return msgspec.structs.replace(event, record=msgspec.structs.replace(event.record, **changed))


class TestContract(ExtensionKit):
    """Every promise of an extension, and of this one."""

    @pytest.fixture
    def make_extension(self, receiver: OtlpReceiver) -> ExtensionFactory:
        return making(receiver.url)

    async def test_an_answer_is_recorded_in_each_instrument(self, host: ExtensionHost, receiver: OtlpReceiver) -> None:
        rows = await sent(host, receiver, ended(), ended(duration=0.4))

        assert {row.name for row in rows} == {DURATION, FIRST_TOKEN, PER_TOKEN, TOKENS}
        duration, first, per_token = (one(rows, name) for name in (DURATION, FIRST_TOKEN, PER_TOKEN))
        assert duration.sum == pytest.approx(0.6)
        assert first.sum == pytest.approx(0.2)
        # The tokens after the first have the time after it.
        assert per_token.sum == pytest.approx((0.2 - 0.1) / 6 + (0.4 - 0.1) / 6)
        for row in (duration, first, per_token):
            assert (row.unit, row.count, row.attributes, row.delta) == ("s", 2, ANSWERED, False)
        for kind, total in (("input", 60), ("output", 14)):
            usage = one(rows, TOKENS, kind)
            assert (usage.unit, usage.count, usage.sum) == ("{token}", 2, total)
            assert usage.attributes == ANSWERED | {"gen_ai.token.type": kind}

    async def test_the_buckets_are_those_of_the_conventions(self, host: ExtensionHost, receiver: OtlpReceiver) -> None:
        rows = await sent(host, receiver, ended(duration=100.0))

        slow = one(rows, DURATION)
        assert slow.bounds == [0.01 * 2**power for power in range(14)]
        assert slow.counts == [0] * 14 + [1]
        assert (one(rows, FIRST_TOKEN).bounds[0], one(rows, FIRST_TOKEN).bounds[-1]) == (0.001, 10.0)
        assert (one(rows, PER_TOKEN).bounds[0], one(rows, PER_TOKEN).bounds[-1]) == (0.01, 2.5)
        tokens = one(rows, TOKENS, "input")
        assert tokens.bounds == [4**power for power in range(14)]
        assert tokens.counts[3] == 1

    async def test_a_request_that_no_worker_had_has_its_error_and_no_tokens(
        self, host: ExtensionHost, receiver: OtlpReceiver
    ) -> None:
        (row,) = await sent(host, receiver, ended("overloaded"))

        assert (row.name, row.attributes) == (DURATION, NAMES | {"error.type": "overloaded"})

    async def test_tokens_of_a_request_that_failed_at_a_worker_count(
        self, host: ExtensionHost, receiver: OtlpReceiver
    ) -> None:
        broken = ended("cancelled", instance_id=WORKERS[0], output_tokens=5, time_to_first_token=0.1)

        rows = await sent(host, receiver, broken)

        assert sorted(row.name for row in rows) == [TOKENS, TOKENS, DURATION]
        assert one(rows, TOKENS, "output").sum == 5
        assert "error.type" not in one(rows, TOKENS, "input").attributes

    async def test_an_answer_without_tokens_has_no_output(self, host: ExtensionHost, receiver: OtlpReceiver) -> None:
        embedded = ended(endpoint="embeddings", output_tokens=0, time_to_first_token=None, instance_id=None)

        rows = await sent(host, receiver, embedded)

        assert sorted(row.name for row in rows) == [TOKENS, DURATION]
        assert one(rows, TOKENS, "input").sum == 30
        assert one(rows, DURATION).attributes["gen_ai.operation.name"] == "embeddings"

    async def test_an_answer_of_one_token_has_no_time_per_token(
        self, host: ExtensionHost, receiver: OtlpReceiver
    ) -> None:
        rows = await sent(host, receiver, ended(output_tokens=1))

        assert PER_TOKEN not in {row.name for row in rows}
        assert one(rows, FIRST_TOKEN).count == 1

    async def test_models_beyond_a_number_are_one(
        self, host: ExtensionHost, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dynamo_plugin_extension_otel_metrics.gen_ai_histograms.MODELS", 2)

        rows = await sent(host, receiver, *(ended(model=name) for name in "abcda"))

        counts = {row.attributes["gen_ai.request.model"]: row.count for row in rows if row.name == DURATION}
        assert counts == {"a": 2, "b": 1, "other": 2}

    async def test_values_are_sent_while_it_runs(self, receiver: OtlpReceiver) -> None:
        async with self.running(making(receiver.url, 0.1)) as host:
            host.publish(ended())
            assert await asyncio.to_thread(receiver.until, lambda: len(receiver.bodies(METRICS)) >= 2)

        assert one(histograms(receiver.bodies(METRICS)[-1]), DURATION).count == 1

    async def test_a_collector_that_does_not_answer_delays_the_end_by_a_bounded_time_and_nothing_else(
        self, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dynamo_plugin_extension_otel_metrics.extension._LAST_EXPORT", 0.2)
        receiver.answering.clear()
        async with self.running(making(receiver.url, 0.1)) as host:
            host.publish(ended())
            assert await asyncio.to_thread(receiver.until, lambda: receiver.received)
            logging.getLogger(SDK_LOG).error("a line of another exporter")
            # The exporter waits for the collector; events are read all the same.
            await self.send(host, [ended()])
            assert host.unread == 0

        assert "the last metrics could not be exported within 0.2 s" in caplog.text
        assert "a line of another exporter" in caplog.text
        assert len(receiver.received) == 1


@pytest.mark.parametrize(
    ("variables", "service"),
    [
        ({}, "dynamo-frontend"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,deployment.environment.name=test"}, "mine"),
        # All processes of a frontend have the same environment.
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=all"}, "dynamo-frontend"),
    ],
)
async def test_a_metric_stream_names_its_service_instance(
    variables: Mapping[str, str], service: str, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    host = ExtensionHost(making(receiver.url))
    await host.start()

    resource = one(await sent(host, receiver, ended()), DURATION).resource

    assert resource["service.name"] == service
    assert resource["service.instance.id"] == f"{host.extension.services.peers.own.frontend_id:x}"


async def test_the_environment_sets_endpoint_interval_and_headers(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    host = ExtensionHost(making(None, None))
    await host.start()
    host.publish(ended())
    assert await asyncio.to_thread(receiver.until, lambda: receiver.received)
    await sent(host, receiver, ended())

    assert all(one.headers["authorization"] == "Bearer secret" for one in receiver.received)
    first, second = (one(histograms(body), DURATION) for body in receiver.bodies(METRICS)[:2])
    assert (first.delta, first.count, second.count) == (True, 1, 1)


@pytest.mark.parametrize("path", ["", "/", "/v1/metrics", "/v1/metrics/"])
async def test_the_key_goes_before_the_variable(
    path: str, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "collector:4317")
    host = ExtensionHost(making(receiver.url + path))
    await host.start()

    assert await sent(host, receiver, ended())


async def test_with_the_sdk_disabled_nothing_is_sent_or_read(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    host = ExtensionHost(making(receiver.url))
    await host.start()
    host.publish(ended())
    await host.aclose()

    assert not host.subscribes
    assert receiver.received == []


async def test_a_refusing_collector_is_logged_once_and_so_is_its_return(
    receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    receiver.status = 401
    host = ExtensionHost(making(receiver.url, 0.1))
    await host.start()
    host.publish(ended())
    assert await asyncio.to_thread(receiver.until, lambda: len(receiver.received) >= 4)
    (told,) = [line for line in caplog.records if line.levelno >= logging.WARNING]
    receiver.status = 200
    seen = len(receiver.received)
    assert await asyncio.to_thread(receiver.until, lambda: len(receiver.received) >= seen + 3)
    await host.aclose()

    assert told.levelname == "WARNING"
    assert told.getMessage().startswith("metrics are not exported, which is told once: Failed to export metrics")
    assert "code: 401" in told.getMessage()
    assert [line.getMessage() for line in caplog.records[-1:]] == ["metrics are exported again"]
    assert host.failure == ""


async def test_a_collector_that_is_not_there_delays_the_end_by_a_bounded_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_plugin_extension_otel_metrics.extension._LAST_EXPORT", 0.2)
    with OtlpReceiver() as gone:
        endpoint = gone.url
    host = ExtensionHost(making(endpoint))
    await host.start()
    host.publish(ended())
    await host.aclose()

    assert "the last metrics could not be exported within 0.2 s" in caplog.text
    assert not [line for line in caplog.records if line.name == SDK_LOG]


def test_opentelemetry_is_not_imported_before_the_extension_starts() -> None:
    line = (
        "import sys, dynamo_plugin_extension_otel_metrics as plugin; plugin.dynamo_register_extensions();"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout == "[]\n"
