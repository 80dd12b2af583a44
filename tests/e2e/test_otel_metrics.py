"""Metrics of real processes, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.otlp import METRICS, Histogram, OtlpReceiver, histograms

CONFIG = """
frontend: {processes: 1}
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
extensions: [{use: otel-metrics}, {use: feed}]
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 20, block_size: 16, num_gpu_blocks: 40}
    grace_period: 0
client: {drain_grace: 0}
"""
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "dynamo", "gen_ai.request.model": "mock-model"}
ANSWERED = CHAT | {"gen_ai.response.model": "mock-model"}


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as collector:
        yield collector


def measured(serve: Any, folder: Path, collector: OtlpReceiver) -> Any:
    """Return processes that send to the collector when they end."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "3600000"}
    return serve(CONFIG % {"folder": folder / "discovery"}, env=env)


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": text}], "max_tokens": 20, **more}


def of(rows: list[Histogram], name: str, **attributes: str) -> Histogram:
    """Return the only histogram of a name with these attributes."""
    (row,) = [row for row in rows if row.name == name and row.attributes == attributes]
    return row


def test_a_collector_gets_durations_and_token_usage(
    serve: Any, tmp_path: Path, collector: OtlpReceiver, until_content: Callable[[socket.socket], bytes]
) -> None:
    server = measured(serve, tmp_path, collector)
    status, _, body = server.request("POST", "/v1/chat/completions", chat())
    assert status == 200
    usage = json.loads(body)["usage"]
    assert server.request("POST", "/v1/chat/completions", chat(stream=True))[0] == 200
    assert server.request("POST", "/v1/completions", {"model": "mock-model", "prompt": "hi", "max_tokens": 3})[0] == 200
    # More than the worker's cache holds.
    assert server.request("POST", "/v1/chat/completions", chat("x" * 2000))[0] == 400
    leaving = server.raw("POST", "/v1/chat/completions", chat(stream=True, max_tokens=500), receive_buffer=4096)
    until_content(leaving)
    leaving.close()
    assert server.request("POST", "/v1/chat/completions", chat(model="no-such-model"))[0] == 404
    assert server.until(lambda: server.metric("dynamo_frontend_requests_total") == 5, 10)
    assert collector.received == []
    server.end()

    rows = histograms(collector.bodies(METRICS)[-1])
    duration = of(rows, "gen_ai.server.request.duration", **ANSWERED)
    first = of(rows, "gen_ai.server.time_to_first_token", **ANSWERED)
    per_token = of(rows, "gen_ai.server.time_per_output_token", **ANSWERED)
    assert (duration.count, first.count, per_token.count) == (2, 2, 2)
    assert {duration.unit, first.unit, per_token.unit} == {"s"}
    # The mocker takes 20 ms for each of 20 tokens; nothing is known of how much slower a busy machine is.
    assert duration.sum > 2 * 19 * 0.02
    assert 0 < first.sum < duration.sum
    assert per_token.sum == pytest.approx((duration.sum - first.sum) / (usage["completion_tokens"] - 1))
    assert per_token.counts[0] == 0

    text = ANSWERED | {"gen_ai.operation.name": "text_completion"}
    assert of(rows, "gen_ai.server.request.duration", **text).count == 1
    assert of(rows, "gen_ai.client.token.usage", **text, **{"gen_ai.token.type": "output"}).sum == 3

    failed = {row.attributes.get("error.type"): row for row in rows if row.name == "gen_ai.server.request.duration"}
    assert failed.keys() == {None, "validation", "cancelled"}
    assert failed["validation"].attributes == CHAT | {"error.type": "validation"}
    assert failed["cancelled"].count == 1

    answered = ANSWERED | {"gen_ai.token.type": "input"}
    tokens = of(rows, "gen_ai.client.token.usage", **answered)
    assert (tokens.unit, tokens.count, tokens.sum) == ("{token}", 2, 2 * usage["prompt_tokens"])
    assert tokens.bounds == [4**power for power in range(14)]
    # The client that left had a worker, and has used what it got by then.
    left = of(rows, "gen_ai.client.token.usage", **CHAT, **{"gen_ai.token.type": "output"})
    assert 0 < left.sum < 500
