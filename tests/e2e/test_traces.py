"""Spans and log lines of real processes, as a collector and whoever reads the logs see them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.otlp import TRACES, OtlpReceiver, plain
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

CONFIG = """
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
log: {json: true, level: debug}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5, block_size: 16, num_gpu_blocks: 40}
    grace_period: 0
client: {drain_grace: 0}
"""
IN_TWO = """
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
workers:
  prefill:
    model: {name: mock-model}
    engine: {use: mocker}
    disaggregation_mode: prefill
    grace_period: 0
  decode:
    model: {name: mock-model}
    engine: {use: mocker}
    disaggregation_mode: decode
    grace_period: 0
client: {drain_grace: 0}
"""
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Span:
    """One span as the collector got it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: list[tuple[str, str]]
    kind: int
    failed: bool
    attributes: dict[str, Any]


class Collector(OtlpReceiver):
    """A collector that knows spans."""

    def spans(self) -> list[Span]:
        """Everything received so far."""
        found: list[Span] = []
        for body in self.bodies(TRACES):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = plain(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    found += [_span(service, span) for span in scope.spans]
        return found

    def spans_until(self, condition: Callable[[list[Span]], object]) -> list[Span]:
        """Everything received, once the condition holds."""
        assert self.until(lambda: condition(self.spans())), [span.name for span in self.spans()]
        return self.spans()


def _span(service: str, span: WireSpan) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.kind,
        span.status.code == Status.STATUS_CODE_ERROR,
        plain(span.attributes),
    )


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def traced(serve: Any, collector: Collector, tmp_path: Path) -> Callable[..., Any]:
    """Starts processes that export to the collector, or are told where it is but not to."""

    def start(enabled: str = "1", config: str = CONFIG, **env: str) -> Any:
        told = {
            "OTEL_EXPORT_ENABLED": enabled,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        return serve(config % {"folder": tmp_path / "discovery"}, env=told | env)

    return start


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": text}], "max_tokens": 20, **more}


def ended(name: str, count: int = 1) -> Callable[[list[Span]], bool]:
    return lambda spans: len([span for span in spans if span.name == name]) >= count


def whole(spans: list[Span]) -> bool:
    return {"http-request", "router.route_request", "handle_payload", "engine.generate"} <= {
        span.name for span in spans
    }


def one(spans: list[Span], name: str) -> Span:
    (span,) = [span for span in spans if span.name == name]
    return span


def ancestors(spans: list[Span], span: Span) -> list[str]:
    """The ids above a span, nearest first, as far as they were received, and the one beyond."""
    by_id = {span.span_id: span for span in spans}
    above: list[str] = []
    current: Span | None = span
    while current is not None and current.parent_id:
        above.append(current.parent_id)
        current = by_id.get(current.parent_id)
    return above


def lines(server: Any, message: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in server.lines if line.startswith("{")]
    return [row for row in rows if message in row["message"]]


def test_a_request_is_one_trace_from_the_client_to_the_engine(traced: Any, collector: Collector) -> None:
    server = traced()
    status, _, body = server.request(
        "POST",
        "/v1/chat/completions",
        chat(),
        traceparent=f"00-{TRACE}-{SPAN}-01",
        **{"x-request-id": "client-1"},
    )
    assert status == 200
    spans = collector.spans_until(whole)

    http_request, router, payload, generate = (
        one(spans, name) for name in ("http-request", "router.route_request", "handle_payload", "engine.generate")
    )
    assert {span.trace_id for span in spans} == {TRACE}
    assert http_request.parent_id == SPAN
    assert ancestors(spans, payload) == [router.span_id, http_request.span_id, SPAN]
    assert generate.parent_id == payload.span_id
    assert (http_request.service, payload.service) == ("dynamo-frontend", "dynamo-worker-mock")
    assert router.service == "dynamo-frontend"
    assert (http_request.kind, payload.kind) == (WireSpan.SPAN_KIND_SERVER, WireSpan.SPAN_KIND_SERVER)
    assert router.kind == WireSpan.SPAN_KIND_CLIENT
    assert router.attributes["worker_id"] == payload.attributes["instance_id"]
    assert (router.attributes["router_mode"], router.attributes["request.attempt"]) == ("round-robin", "0")
    assert (router.attributes["request.outcome"], router.attributes["migration.is_retry"]) == ("success", False)
    usage = json.loads(body)["usage"]
    conventions = {name: value for name, value in http_request.attributes.items() if name.startswith("gen_ai.")}
    reasons = conventions.pop("gen_ai.response.finish_reasons")
    assert [reason.string_value for reason in reasons.values] == ["length"]
    assert conventions == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dynamo",
        "gen_ai.request.model": "mock-model",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
    assert generate.attributes["output_tokens"] == usage["completion_tokens"]
    assert generate.attributes["input_tokens"] == usage["prompt_tokens"]
    assert (generate.attributes["model"], generate.attributes["finish_reason"]) == ("mock-model", "Length")
    assert generate.attributes["ttft_ms"] > 0
    assert http_request.attributes["status"] == 200
    assert http_request.attributes["x_request_id"] == "client-1"
    ids = {span.attributes["request_id"] for span in (http_request, router, payload, generate)}
    assert len(ids) == 1
    # A line of the log may come after its span.
    assert server.until(lambda: len(lines(server, "request finished")) == 1, 5)
    (line,) = lines(server, "request finished")
    assert (line["trace_id"], line["span_id"]) == (TRACE, http_request.span_id)
    assert server.until(lambda: len(lines(server, "a request goes to engine")) == 1, 5)
    (line,) = lines(server, "a request goes to engine")
    assert line["process"] == "workers.mock-0"
    assert (line["trace_id"], line["span_id"]) == (TRACE, generate.span_id)
    assert (line["request_id"], line["x_request_id"]) == (ids.pop(), "client-1")
    assert not any(span.failed for span in spans)


def test_the_worker_that_decodes_links_to_the_one_that_prefilled(traced: Any, collector: Collector) -> None:
    server = traced(config=IN_TWO)
    status, _, _ = server.request("POST", "/v1/chat/completions", chat(), traceparent=f"00-{TRACE}-{SPAN}-01")
    assert status == 200
    spans = [span for span in collector.spans_until(ended("engine.generate", 2)) if span.name == "engine.generate"]

    by_role = {span.attributes["disagg_role"]: span for span in spans}
    prefill, decode = by_role["prefill"], by_role["decode"]
    assert (prefill.service, decode.service) == ("dynamo-worker-prefill", "dynamo-worker-decode")
    assert prefill.trace_id == decode.trace_id == TRACE
    assert decode.links == [(TRACE, prefill.span_id)]
    assert decode.attributes["migration_span_id"] == prefill.span_id
    assert not prefill.links


def test_a_client_that_leaves_is_seen_in_the_trace(traced: Any, collector: Collector, until_content: Any) -> None:
    server = traced()
    connection: socket.socket = server.raw(
        "POST", "/v1/chat/completions", chat(stream=True, max_tokens=500), receive_buffer=4096
    )
    until_content(connection)
    connection.close()
    spans = collector.spans_until(whole)

    generate = one(spans, "engine.generate")
    assert generate.attributes["cancelled"] is True
    assert generate.attributes["finish_reason"] == "Cancelled"
    assert one(spans, "router.route_request").attributes["request.outcome"] == "cancelled"
    assert one(spans, "http-request").attributes["status"] == 499
    assert not any(span.failed for span in spans)


def test_a_request_that_the_engine_rejects_is_an_error_of_its_kind(traced: Any, collector: Collector) -> None:
    server = traced()
    status, _, _ = server.request("POST", "/v1/chat/completions", chat("x" * 2000))
    spans = collector.spans_until(whole)

    generate = one(spans, "engine.generate")
    assert status == 400
    assert generate.attributes["error_kind"] == "Backend(InvalidArgument)"
    assert generate.failed
    assert one(spans, "http-request").attributes["status"] == 400


def test_a_trace_that_the_client_does_not_sample_is_not_exported(traced: Any, collector: Collector) -> None:
    server = traced()
    server.request("POST", "/v1/chat/completions", chat(), traceparent=f"00-{TRACE}-{SPAN}-00")
    server.request("POST", "/v1/chat/completions", chat())
    spans = collector.spans_until(whole)

    assert TRACE not in {span.trace_id for span in spans}
    assert server.until(lambda: TRACE in {line["trace_id"] for line in lines(server, "request finished")}, 5)


def test_what_was_recorded_last_is_sent_before_a_process_ends(traced: Any, collector: Collector) -> None:
    server = traced(OTEL_BSP_SCHEDULE_DELAY="600000")
    server.request("POST", "/v1/chat/completions", chat())
    assert collector.spans() == []
    server.end()

    assert server.process.returncode == 0
    assert whole(collector.spans())


def test_without_export_the_collector_hears_nothing_and_the_logs_carry_the_trace(
    traced: Any, collector: Collector
) -> None:
    server = traced("0")
    assert server.request("POST", "/v1/chat/completions", chat(), traceparent=f"00-{TRACE}-{SPAN}-01")[0] == 200
    server.end()

    assert collector.received == []
    told = lines(server, "request finished") + lines(server, "a request goes to engine")
    assert [line["process"] for line in told] == ["frontend", "workers.mock-0"]
    assert {line["trace_id"] for line in told} == {TRACE}
    assert len({SPAN, *(line["span_id"] for line in told)}) == 3
