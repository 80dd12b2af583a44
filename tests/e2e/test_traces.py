"""Spans and log lines of real processes, as a collector and a reader of the logs see them."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.otlp import TRACES, OtlpReceiver, plain
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

CONFIG = """
log: {json: true, level: debug}
client: {drain_grace: 0}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5, block_size: 16, num_gpu_blocks: 40}
    grace_period: 0
"""
PROCESSES = """
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""
#: The client's own span.
SPAN = "00f067aa0ba902b7"


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
        """Return everything received so far."""
        found: list[Span] = []
        for body in self.bodies(TRACES):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = plain(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    found += [_span(service, span) for span in scope.spans]
        return found

    def spans_until(self, condition: Callable[[list[Span]], object], trace: str) -> list[Span]:
        """Return everything received of a trace, once the condition holds."""

        def spans() -> list[Span]:
            return [span for span in self.spans() if span.trace_id == trace]

        assert self.until(lambda: condition(spans())), [span.name for span in self.spans()]
        return spans()


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


def exporting(collector: Collector, enabled: str = "1", delay: str = "50") -> dict[str, str]:
    """Return the environment of a process that exports to the collector, or is told where it is but not to."""
    return {
        "OTEL_EXPORT_ENABLED": enabled,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": delay,
    }


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def shared_collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(serve_for_module: Any, shared_collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a frontend and a worker, each in a process that exports."""
    config = CONFIG + PROCESSES % tmp_path_factory.mktemp("shared")
    started = serve_for_module(config, env=exporting(shared_collector))
    assert started.until(lambda: len(started.instances()) == 1, 20), started.log
    return started


@pytest.fixture
def trace() -> str:
    """Return the id of a trace of the client's own."""
    return secrets.token_hex(16)


def parent(trace: str, flags: str = "01") -> str:
    """Return the header with which the client says so."""
    return f"00-{trace}-{SPAN}-{flags}"


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": text}], "max_tokens": 20, **more}


def whole(spans: list[Span]) -> bool:
    return {"http-request", "router.route_request", "handle_payload", "engine.generate"} <= {
        span.name for span in spans
    }


def one(spans: list[Span], name: str) -> Span:
    (span,) = [span for span in spans if span.name == name]
    return span


def ancestors(spans: list[Span], span: Span) -> list[str]:
    """Return the ids above a span, nearest first, as far as they were received, and the one beyond."""
    by_id = {span.span_id: span for span in spans}
    above: list[str] = []
    current: Span | None = span
    while current is not None and current.parent_id:
        above.append(current.parent_id)
        current = by_id.get(current.parent_id)
    return above


def lines(server: Any, message: str, trace: str) -> list[dict[str, Any]]:
    """Return the lines of the log that say this, and are of the trace."""
    rows = [json.loads(line) for line in server.lines if line.startswith("{")]
    return [row for row in rows if message in row["message"] and row.get("trace_id") == trace]


def test_a_request_is_one_trace_from_the_client_to_the_engine(
    server: Any, shared_collector: Collector, trace: str
) -> None:
    status, _, body = server.request(
        "POST", "/v1/chat/completions", chat(), traceparent=parent(trace), **{"x-request-id": "client-1"}
    )
    assert status == 200
    spans = shared_collector.spans_until(whole, trace)

    http_request, router, payload, generate = (
        one(spans, name) for name in ("http-request", "router.route_request", "handle_payload", "engine.generate")
    )
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
    (request_id,) = ids
    own = [span for span in shared_collector.spans() if span.attributes.get("request_id") == request_id]
    assert {span.trace_id for span in own} == {trace}
    # A line of the log may come after its span.
    assert server.until(lambda: len(lines(server, "request finished", trace)) == 1, 5)
    (line,) = lines(server, "request finished", trace)
    assert line["span_id"] == http_request.span_id
    assert server.until(lambda: len(lines(server, "a request goes to engine", trace)) == 1, 5)
    (line,) = lines(server, "a request goes to engine", trace)
    assert line["process"] == "workers.mock-0"
    assert line["span_id"] == generate.span_id
    assert (line["request_id"], line["x_request_id"]) == (request_id, "client-1")
    assert not any(span.failed for span in spans)


def test_a_client_disconnect_is_in_the_trace(
    server: Any, shared_collector: Collector, trace: str, until_content: Any
) -> None:
    connection: socket.socket = server.raw(
        "POST",
        "/v1/chat/completions",
        chat(stream=True, max_tokens=500),
        receive_buffer=4096,
        traceparent=parent(trace),
    )
    until_content(connection)
    connection.close()
    spans = shared_collector.spans_until(whole, trace)

    generate = one(spans, "engine.generate")
    assert generate.attributes["cancelled"] is True
    assert generate.attributes["finish_reason"] == "Cancelled"
    assert one(spans, "router.route_request").attributes["request.outcome"] == "cancelled"
    assert one(spans, "http-request").attributes["status"] == 499
    assert not any(span.failed for span in spans)


def test_a_request_that_the_engine_rejects_is_an_error_of_its_kind(
    server: Any, shared_collector: Collector, trace: str
) -> None:
    status, _, _ = server.request("POST", "/v1/chat/completions", chat("x" * 2000), traceparent=parent(trace))
    spans = shared_collector.spans_until(whole, trace)

    generate = one(spans, "engine.generate")
    assert status == 400
    assert generate.attributes["error_kind"] == "Backend(InvalidArgument)"
    assert generate.failed
    assert one(spans, "http-request").attributes["status"] == 400


def test_the_last_spans_are_exported_before_the_exit(serve: Any, collector: Collector) -> None:
    server = serve(CONFIG, env=exporting(collector, delay="600000"))
    server.request("POST", "/v1/chat/completions", chat())
    assert collector.spans() == []
    server.end()

    assert server.process.returncode == 0
    assert whole(collector.spans())


@pytest.mark.full
def test_without_export_no_span_is_sent_and_logs_have_the_trace_id(
    serve: Any, collector: Collector, trace: str, tmp_path: Path
) -> None:
    server = serve(CONFIG + PROCESSES % (tmp_path / "discovery"), env=exporting(collector, enabled="0"))
    assert server.request("POST", "/v1/chat/completions", chat(), traceparent=parent(trace))[0] == 200
    server.end()

    assert collector.received == []
    told = lines(server, "request finished", trace) + lines(server, "a request goes to engine", trace)
    assert [line["process"] for line in told] == ["frontend", "workers.mock-0"]
    assert len({SPAN, *(line["span_id"] for line in told)}) == 3
