"""The span of a client request, as the accounting opens it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import tracing
from dynamo_core.errors import CLIENT_CLOSED_REQUEST
from dynamo_core.protocol.records import RequestRecord
from dynamo_runtime.telemetry.request_accounting import Inflight, RequestTracker
from dynamo_telemetry.metrics import Metrics
from opentelemetry.trace import SpanKind, StatusCode

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"

Record = Callable[..., Any]


def begin(
    headers: dict[str, str] | None = None, announce: Callable[[RequestRecord], None] = lambda record: None
) -> Inflight:
    requests = RequestTracker(Metrics(), announce)
    return requests.begin(model="m", endpoint="chat_completions", streaming=True, headers=headers or {})


def test_the_span_is_a_child_of_the_clients_and_parent_of_the_workers(record: Record) -> None:
    recorded = record()

    with begin({"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "client-1"}) as request:
        request.prompt_tokens(7)
        request.output(3)
        request.succeed("stop")

    span = recorded.one("http-request")
    assert span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    assert request.metadata["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert dict(span.attributes) == {
        "method": "POST",
        "endpoint": "chat_completions",
        "model": "m",
        "streaming": True,
        "request_id": request.request_id,
        "x_request_id": "client-1",
        "status": 200,
        "input_tokens": 7,
        "output_tokens": 3,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dynamo",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("kind", "status", "code", "description"),
    [("internal", 500, StatusCode.ERROR, "internal"), ("validation", 400, StatusCode.UNSET, None)],
)
def test_a_failure_of_the_server_is_an_error_and_a_mistake_of_the_client_is_not(
    record: Record, kind: str, status: int, code: StatusCode, description: str | None
) -> None:
    recorded = record()

    with begin() as request:
        request.fail(kind, status)

    span = recorded.one("http-request")
    assert (span.attributes["status"], span.attributes["error_type"]) == (status, kind)
    assert (span.status.status_code, span.status.description) == (code, description)


def test_nor_is_a_client_that_leaves(record: Record) -> None:
    recorded = record()

    with pytest.raises(asyncio.CancelledError), begin():
        raise asyncio.CancelledError

    span = recorded.one("http-request")
    assert (span.attributes["status"], span.attributes["error_type"]) == (CLIENT_CLOSED_REQUEST, "cancelled")
    assert span.status.status_code is StatusCode.UNSET


def test_the_record_is_announced_inside_the_span(record: Record) -> None:
    record()
    seen: list[tracing.TraceContext | None] = []

    with begin(announce=lambda _: seen.append(tracing.current.get())) as request:
        pass

    assert seen == [request.trace]
    assert tracing.current.get() is None


def test_a_trace_that_is_not_sampled_goes_on_but_is_not_recorded(record: Record) -> None:
    recorded = record()

    with begin({"traceparent": f"00-{TRACE}-{SPAN}-00"}) as request:
        pass

    assert recorded.spans == []
    assert request.metadata["traceparent"].startswith(f"00-{TRACE}-")
    assert request.metadata["traceparent"].endswith("-00")
