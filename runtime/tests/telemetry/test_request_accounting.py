from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import tracing
from dynamo_core.contracts.frontend import InflightRequest, RequestLog
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.errors import DynamoError, QuotaExceeded, RateLimited, ServiceOverloaded, problem_of
from dynamo_core.protocol.records import RequestRecord
from dynamo_runtime.telemetry import request_accounting
from dynamo_runtime.telemetry.request_accounting import Inflight, RequestTracker
from dynamo_runtime.telemetry.stages import BUCKETS
from dynamo_telemetry import logs
from dynamo_telemetry.metrics import Metrics
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

GAUGES = ("active_requests", "inflight_requests", "queued_requests")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class House:
    """The accounting with a clock set by hand and a list of what was announced."""

    def __init__(self, announce: Callable[[RequestRecord], None] | None = None) -> None:
        self.metrics = Metrics()
        self.records: list[RequestRecord] = []
        self.clock = Clock()
        self.requests = RequestTracker(self.metrics, announce or self.records.append, clock=self.clock)

    def begin(
        self,
        model: str = "m",
        endpoint: str = "chat_completions",
        streaming: bool = True,
        headers: dict[str, str] | None = None,
    ) -> Inflight:
        return self.requests.begin(model=model, endpoint=endpoint, streaming=streaming, headers=headers or {})

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"dynamo_frontend_{name}", labels)

    def gauges(self, model: str = "m") -> list[float | None]:
        return [self.value(name, model=model) for name in GAUGES]


@pytest.fixture
def house() -> House:
    return House()


async def test_a_scrape_shows_every_request_that_has_ended_before_it(house: House) -> None:
    def finished(page: bytes) -> bytes:
        [line] = [line for line in page.splitlines() if line.startswith(b"dynamo_frontend_requests_total{")]
        return line.split()[-1]

    for count in (b"1.0", b"2.0"):
        with house.begin() as request:
            request.succeed("stop")
        assert finished(await house.metrics.render()) == count
    house.requests.refused("validation")
    assert b'reason="validation"' in await house.metrics.render()


def test_the_request_tracker_implements_the_request_log_protocol() -> None:
    log: RequestLog = House().requests
    request: InflightRequest = log.begin(model="m", endpoint="completions", streaming=False, headers={})

    assert request.request_id


def test_a_streamed_request_is_counted_from_begin_to_end(house: House, chat: dict[str, Any]) -> None:
    with house.begin() as request:
        arrived = house.gauges()
        request.prompt_tokens(50)
        prepared = house.gauges()
        request.routed(7)
        house.clock.now += 0.5
        request.output(2)
        streaming = house.gauges()
        house.clock.now += 0.03125
        request.output(3)
        house.clock.now += 0.125
        request.succeed("stop")

    assert arrived == [1, 0, 1]
    assert prepared == [1, 1, 1]
    assert streaming == [1, 1, 0]
    assert house.gauges() == [0, 0, 0]
    (record,) = house.records
    assert record == RequestRecord(
        request_id=request.request_id,
        **chat,
        prompt_tokens=50,
        output_tokens=5,
        duration=0.65625,
        time_to_first_token=0.5,
        instance_id=7,
        trace_id=request.trace_id,
        span_id=request.trace.span_id,
    )
    kind = {"model": "m", "endpoint": "chat_completions", "request_type": "stream"}
    assert house.value("requests_started_total", **kind) == 1
    assert house.value("requests_total", **kind, status="success", error_type="") == 1
    assert house.value("output_tokens_total", model="m") == 5
    assert house.value("input_sequence_tokens_sum", model="m") == 50
    assert house.value("output_sequence_tokens_sum", model="m") == 5
    assert house.value("request_duration_seconds_count", model="m") == 1
    assert house.value("time_to_first_token_seconds_sum", model="m") == 0.5


def test_the_record_has_the_principal_and_cached_tokens(house: House) -> None:
    principal = Principal(key_id="k", tenant="blue", user="u", session="s", headers={"x-team": "a"})
    with house.requests.begin(model="m", endpoint="e", streaming=False, headers={}, principal=principal) as request:
        request.succeed("stop", cached_tokens=48)

    (record,) = house.records
    assert (record.key_id, record.tenant, record.user, record.session) == ("k", "blue", "u", "s")
    assert record.cached_tokens == 48


def test_tokens_of_one_write_share_the_gap_before_it(house: House) -> None:
    with house.begin() as request:
        request.output(4)
        house.clock.now += 0.03
        request.output(3)
        house.clock.now += 0.5
        request.output(1)
        unmerged = house.value("inter_token_latency_seconds_count", model="m")

    assert unmerged == 0
    assert house.value("inter_token_latency_seconds_count", model="m") == 4
    assert house.value("inter_token_latency_seconds_sum", model="m") == pytest.approx(0.53)
    assert house.value("inter_token_latency_seconds_bucket", model="m", le="0.0059") == 0
    assert house.value("inter_token_latency_seconds_bucket", model="m", le="0.011") == 3
    assert house.value("inter_token_latency_seconds_bucket", model="m", le="0.69") == 4


def test_names_types_labels_and_buckets_are_those_of_the_dashboard(house: House) -> None:
    with house.begin() as request:
        request.prompt_tokens(1)
        request.output(1)
        request.output(1)
        request.fail("overload", 503)
    with house.begin() as request:
        request.disconnected()

    families = {
        family.name: family for family in text_string_to_metric_families(house.metrics.render_now().decode("utf-8"))
    }

    found = {}
    buckets = {}
    for name, family in families.items():
        labels = {tuple(sorted(label for label in sample.labels if label != "le")) for sample in family.samples}
        found[name.removeprefix("dynamo_frontend_")] = (family.type, labels)
        bounds = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
        if bounds:
            buckets[name.removeprefix("dynamo_frontend_")] = [float(bound) for bound in bounds]
    endpoint = ("endpoint", "model", "request_type")
    # The parser takes _total from the names of counters.
    assert found == {
        "requests": ("counter", {("endpoint", "error_type", "model", "request_type", "status")}),
        "requests_started": ("counter", {endpoint}),
        "model_cancellation": ("counter", {endpoint}),
        "model_rejection": ("counter", {("endpoint", "model")}),
        "output_tokens": ("counter", {("model",)}),
        "active_requests": ("gauge", {("model",)}),
        "inflight_requests": ("gauge", {("model",)}),
        "queued_requests": ("gauge", {("model",)}),
        "disconnected_clients": ("gauge", {()}),
        "request_duration_seconds": ("histogram", {("model",)}),
        "time_to_first_token_seconds": ("histogram", {("model",)}),
        "inter_token_latency_seconds": ("histogram", {("model",)}),
        "input_sequence_tokens": ("histogram", {("model",)}),
        "output_sequence_tokens": ("histogram", {("model",)}),
        "cached_tokens": ("histogram", {("model",)}),
        "failures": ("counter", {("class", "reason")}),
        "stage_duration_seconds": ("histogram", {("stage",)}),
        "stage_requests": ("gauge", {("phase", "stage")}),
    }
    inf = float("inf")
    tokens_in = [0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000, inf]
    ttft = [0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480, inf]
    itl_low = [0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69]
    assert buckets == {
        "request_duration_seconds": [0, 2, 4, 8, 16, 32, 64, 130, 260, 510, inf],
        "time_to_first_token_seconds": ttft,
        "inter_token_latency_seconds": [*itl_low, 1.2, 2.3, 4.1, 7.4, 13, 24, 44, 80, inf],
        "input_sequence_tokens": tokens_in,
        "output_sequence_tokens": [0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000, inf],
        "cached_tokens": tokens_in,
        "stage_duration_seconds": [*BUCKETS, inf],
    }


def refused(error: DynamoError) -> Callable[[Inflight], None]:
    problem = problem_of(error)
    return lambda request: request.fail(problem.metric, problem.status)


REJECTED = "model_rejection_total"
GONE, LEFT = "disconnected_clients", "model_cancellation_total"


@pytest.mark.parametrize(
    ("ends", "status", "error", "http_status", "counted"),
    [
        # A refusal for load is counted by model and endpoint, that of a client as a failure of its own.
        ([refused(ServiceOverloaded())], "error", "overload", 503, {REJECTED: 1, GONE: 0}),
        ([refused(RateLimited())], "error", "rate_limited", 429, {REJECTED: None}),
        ([refused(QuotaExceeded())], "error", "quota_exceeded", 429, {REJECTED: None}),
        # A client that left is counted once, and changes nothing after the answer.
        ([Inflight.disconnected, Inflight.disconnected], "error", "cancelled", 499, {GONE: 1, LEFT: 1}),
        (
            [
                lambda request: request.succeed("stop"),
                Inflight.disconnected,
                lambda request: request.fail("internal", 500),
            ],
            "success",
            "",
            200,
            {GONE: 0, LEFT: None},
        ),
    ],
)
def test_request_that_ends_so_is_recorded_and_counted_so(
    house: House,
    ends: list[Callable[[Inflight], None]],
    status: str,
    error: str,
    http_status: int,
    counted: dict[str, int | None],
) -> None:
    with house.begin() as request:
        request.output(1)
        for end in ends:
            end(request)

    kind = {"model": "m", "endpoint": "chat_completions", "request_type": "stream"}
    labels = {REJECTED: {"model": "m", "endpoint": "chat_completions"}, LEFT: kind, GONE: {}}
    (record,) = house.records
    assert (record.status, record.error_type, record.http_status) == (status, error, http_status)
    assert house.value("requests_total", **kind, status=status, error_type=error) == 1
    assert {name: house.value(name, **labels[name]) for name in counted} == counted


def test_a_request_without_an_outcome_counts_as_failed(house: House) -> None:
    with house.begin(streaming=False):
        pass

    (record,) = house.records
    assert (record.status, record.error_type, record.http_status) == ("error", "internal", 500)


@pytest.mark.parametrize(("error", "metric"), [(RateLimited(), "rate_limited"), (QuotaExceeded(), "quota_exceeded")])
def test_failures_are_counted_by_class_and_reason(house: House, error: DynamoError, metric: str) -> None:
    with house.begin() as request:
        refused(error)(request)

    assert house.value("failures_total", **{"class": type(error).__name__, "reason": metric}) == 1


async def test_a_cancelled_handler_counts_as_cancelled(house: House) -> None:
    entered = asyncio.Event()

    async def handler() -> None:
        with house.begin():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(handler())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])

    assert house.records[0].error_type == "cancelled"
    assert house.gauges() == [0, 0, 0]


def test_begin_alone_counts_nothing(house: House) -> None:
    request = house.begin()
    request.output(1)
    request.__exit__(None, None, None)

    assert house.records == []
    assert house.gauges() == [0, 0, 0]


def test_the_record_is_announced_after_everything_was_released() -> None:
    seen: list[list[float | None]] = []
    watched = House(announce=lambda _: seen.append(watched.gauges()))

    with watched.begin() as request:
        request.prompt_tokens(1)

    assert seen == [[0, 0, 0]]


def test_a_failing_listener_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def announce(record: RequestRecord) -> None:
        raise ValueError("listener is broken")

    house = House(announce=announce)

    with caplog.at_level(logging.ERROR), house.begin() as request:
        request.succeed(None)

    assert "listener of finished requests failed" in caplog.text
    assert tracing.current.get() is None
    assert house.gauges() == [0, 0, 0]


def test_a_trace_goes_on_and_the_clients_id_travels(house: House) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"

    request = house.begin(headers={"traceparent": parent, "tracestate": "a=1", "x-request-id": "client-1"})

    assert request.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert request.trace.span_id != "00f067aa0ba902b7"
    assert request.metadata == {
        "traceparent": request.trace.traceparent,
        "tracestate": "a=1",
        "x-request-id": "client-1",
    }
    assert str(uuid.UUID(request.request_id)) == request.request_id


@pytest.mark.parametrize("value", ["", "a b", "a\x1b", "é", "x" * 257])
def test_an_odd_request_id_of_a_client_is_not_passed_on(value: str) -> None:
    request = House().begin(headers={"x-request-id": value, "traceparent": "nonsense"})

    assert list(request.metadata) == ["traceparent"]


def test_the_request_is_the_current_one_while_it_is_entered(house: House) -> None:
    with house.begin(headers={"x-request-id": "client-1"}) as request:
        inside = (tracing.current.get(), logs.context.get())

    assert inside == (request.trace, logs.LogContext(request.request_id, "client-1"))
    assert (tracing.current.get(), logs.context.get()) == (None, None)


def test_a_request_may_end_in_another_context_than_it_began_in(house: House) -> None:
    request = house.begin()
    contextvars.copy_context().run(request.__enter__)

    request.__exit__(None, None, None)

    assert len(house.records) == 1


def test_models_beyond_the_limit_share_one_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_accounting, "MAX_MODELS", 2)
    house = House()

    for model in ("a", "b", "c", "d", "a"):
        with house.begin(model=model) as request:
            request.succeed("stop")

    assert house.value("request_duration_seconds_count", model="a") == 2
    assert house.value("request_duration_seconds_count", model="other") == 2
    assert house.value("request_duration_seconds_count", model="c") is None
    assert [record.model for record in house.records] == ["a", "b", "c", "d", "a"]


def test_the_prefix_can_be_changed() -> None:
    metrics = Metrics()

    RequestTracker(metrics, lambda record: None, prefix="my_front")

    assert "my_front_disconnected_clients 0.0" in metrics.render_now().decode()
    assert "dynamo_frontend" not in metrics.render_now().decode()


calls = st.sampled_from(["prompt", "output", "nothing", "routed", "succeed", "fail", "overload", "disconnected"])
endings = st.sampled_from([None, ValueError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt])


@given(st.lists(st.tuples(st.lists(calls, max_size=8), endings), max_size=4))
def test_every_outcome_resets_the_gauges_and_makes_one_record(
    plans: list[tuple[list[str], type[BaseException] | None]],
) -> None:
    house = House()
    open_requests = []

    for steps, ending in plans:
        request = house.begin()
        request.__enter__()
        open_requests.append((request, steps, ending))
    for request, steps, _ in open_requests:
        for step in steps:
            house.clock.now += 0.01
            perform(request, step)
    for request, _, ending in reversed(open_requests):
        request.__exit__(ending, ending and ending(), None)
        request.__exit__(None, None, None)

    if plans:
        assert house.gauges() == [0, 0, 0]
    assert len(house.records) == len(plans)
    assert sorted(record.request_id for record in house.records) == sorted(r.request_id for r, _, _ in open_requests)
    finished = itertools.chain.from_iterable(
        family.samples for family in house.metrics.registry.collect() if family.name == "dynamo_frontend_requests"
    )
    assert sum(sample.value for sample in finished) == len(plans)
    for record in house.records:
        assert (record.status == "success") == (record.error_type == "") == (record.http_status == 200)


def perform(request: Inflight, step: str) -> None:
    match step:
        case "prompt":
            request.prompt_tokens(5)
        case "output":
            request.output(2)
        case "nothing":
            request.output(0)
        case "routed":
            request.routed(1)
        case "succeed":
            request.succeed("stop")
        case "fail":
            request.fail("internal", 500)
        case "overload":
            request.fail("overload", 503)
        case _:
            request.disconnected()
