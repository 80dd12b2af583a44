from __future__ import annotations

import asyncio
import contextvars
import os
import random
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from dynamo_core import get_distributed_tracing_context, inject_trace_headers_into_map, start_span, tracing
from dynamo_core.errors import BackendError
from dynamo_core.protocol.request import TraceLink
from dynamo_core.spans import MAX_ERROR
from dynamo_core.tracing import TraceContext
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
CALLER = TraceContext(TRACE, SPAN, tracestate="rojo=1")

Record = Callable[..., Any]


def ids(span: ReadableSpan) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


@pytest.fixture(params=["off", "on"])
def either(request: pytest.FixtureRequest, record: Record) -> str:
    """Return once without and once with recording: what follows must not differ."""
    mode: str = request.param
    if mode == "on":
        record()
    return mode


@pytest.mark.usefixtures("either")
class TestWhetherRecordedOrNot:
    def test_a_span_without_a_parent_begins_a_new_trace(self) -> None:
        one, other = start_span("a"), start_span("b")

        assert one.context.trace_id != other.context.trace_id
        assert tracing.parse_traceparent(one.context.traceparent) == one.context

    def test_a_span_is_a_child_of_the_callers(self) -> None:
        span = start_span("a", parent=CALLER)

        assert span.context.trace_id == TRACE
        assert span.context.span_id != SPAN
        assert span.context.tracestate == "rojo=1"

    def test_spans_inside_one_another_are_one_trace_and_leaving_restores_the_outer(self) -> None:
        with start_span("outer", parent=CALLER) as outer:
            with start_span("inner") as inner:
                deepest = tracing.current.get()
            after = tracing.current.get()

        assert deepest == inner.context
        assert inner.context.trace_id == TRACE
        assert after == outer.context
        assert tracing.current.get() is None

    def test_the_headers_name_the_current_span(self) -> None:
        headers = {"accept": "x"}

        with start_span("a", parent=CALLER) as span:
            inject_trace_headers_into_map(headers)
            inside = get_distributed_tracing_context()

        assert headers == {
            "accept": "x",
            "traceparent": f"00-{TRACE}-{span.context.span_id}-01",
            "tracestate": "rojo=1",
        }
        assert inside["trace_id"] == TRACE
        assert inside["span_id"] == span.context.span_id

    def test_unsampled_traces_stay_unsampled(self) -> None:
        with start_span("a", parent=TraceContext(TRACE, SPAN, sampled=False)) as span, start_span("b") as inner:
            assert not span.recording
            assert not inner.recording
        assert inner.context.traceparent == f"00-{TRACE}-{inner.context.span_id}-00"

    def test_a_random_seed_does_not_repeat_ids(self) -> None:
        seen = set()
        for _ in range(2):
            random.seed(0)
            seen.add(start_span("a").context.span_id)
            seen.add(start_span("a", parent=CALLER).context.span_id)

        assert len(seen) == 4

    def test_an_unrecorded_span_accepts_all_calls(self) -> None:
        span = start_span("a", attributes={"a": 1}, links=[TraceLink(TRACE, SPAN)])
        for _ in range(2):
            span.set_attribute("b", "x")
            span.set_attributes({"c": [1, 2]})
            span.set_error("no")
            span.add_link(span.link)
            span.end()

        assert span.link == TraceLink(span.context.trace_id, span.context.span_id)

    async def test_a_generator_keeps_its_span_between_its_items(self) -> None:
        async def work() -> AsyncGenerator[str | None, None]:
            with start_span("work") as span:
                for _ in range(2):
                    await asyncio.sleep(0)
                    yield span.context.span_id if tracing.current.get() == span.context else None

        seen = [item async for item in work()]

        assert seen[0] is not None
        assert seen[0] == seen[1]
        assert tracing.current.get() is None

    async def test_a_generator_that_another_task_closes_ends_its_span_all_the_same(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def work() -> AsyncGenerator[None, None]:
            with start_span("work"):
                yield

        items = work()
        await asyncio.create_task(anext(items))
        await items.aclose()

        assert tracing.current.get() is None
        assert caplog.records == []

    async def test_a_task_made_inside_a_span_has_a_copy_of_its_context(self) -> None:
        seen: dict[str, TraceContext | None] = {}
        go = asyncio.Event()

        async def child() -> None:
            await go.wait()
            with start_span("child") as span:
                seen["inside"] = span.context
            seen["child"] = tracing.current.get()

        with start_span("parent") as parent:
            task = asyncio.create_task(child())
        # The span has ended; the task does not know.
        go.set()
        await task

        assert seen["child"] == parent.context
        assert seen["inside"] is not None
        assert seen["inside"].trace_id == parent.context.trace_id

    async def test_a_task_that_was_there_before_does_not_see_the_span(self) -> None:
        asked: asyncio.Queue[asyncio.Future[TraceContext | None]] = asyncio.Queue()

        async def worker() -> None:
            (await asked.get()).set_result(tracing.current.get())

        task = asyncio.create_task(worker())
        with start_span("parent"):
            answer: asyncio.Future[TraceContext | None] = asyncio.get_running_loop().create_future()
            asked.put_nowait(answer)
            assert await answer is None
        await task

    def test_a_task_can_be_made_outside_of_the_trace_on_purpose(self) -> None:
        with start_span("parent"):
            assert contextvars.Context().run(tracing.current.get) is None


def test_a_recorded_span_has_its_attributes(record: Record) -> None:
    recorded = record()

    with start_span("a", kind="server", attributes={"x": 1}, parent=CALLER) as span:
        assert span.recording
        span.set_attribute("y", "text")
        span.set_attributes({"z": 1.5, "w": True})

    (found,) = recorded.spans
    assert ids(found) == (TRACE, span.context.span_id)
    assert parent_of(found) == SPAN
    assert found.parent.is_remote
    assert found.kind is SpanKind.SERVER
    assert dict(found.attributes) == {"x": 1, "y": "text", "z": 1.5, "w": True}
    assert found.status.status_code is StatusCode.UNSET
    assert found.context.trace_state.to_header() == "rojo=1"


def test_a_span_inside_is_recorded_below_the_outer(record: Record) -> None:
    recorded = record()

    with start_span("outer") as outer, start_span("inner", kind="client"):
        pass

    inner = recorded.one("inner")
    assert parent_of(inner) == outer.context.span_id
    assert not inner.parent.is_remote
    assert parent_of(recorded.one("outer")) is None


def test_changes_after_the_end_of_a_span_are_ignored(record: Record, caplog: pytest.LogCaptureFixture) -> None:
    recorded = record()
    span = start_span("a")
    span.end()
    span.set_attribute("x", 1)
    span.set_attributes({"y": 1})
    span.set_error("no")
    span.add_link(TraceLink(TRACE, SPAN))
    span.end()

    (found,) = recorded.spans
    assert not found.attributes
    assert not found.links
    assert found.status.status_code is StatusCode.UNSET
    assert caplog.records == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (KeyError(), "KeyError"),
        (BackendError.InvalidArgument("no"), "Backend(InvalidArgument): no"),
        (ValueError("x" * 5000), "ValueError: " + "x" * (MAX_ERROR - 12)),
    ],
)
def test_an_exception_that_passes_through_sets_the_error_status(record: Record, error: Exception, text: str) -> None:
    recorded = record()

    with pytest.raises(type(error)), start_span("a"):
        raise error

    (found,) = recorded.spans
    assert (found.status.status_code, found.status.description) == (StatusCode.ERROR, text)


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_being_cancelled_or_closed_is_no_error(record: Record, error: type[BaseException]) -> None:
    recorded = record()

    with pytest.raises(error), start_span("a"):
        raise error

    (found,) = recorded.spans
    assert found.status.status_code is StatusCode.UNSET


def test_a_link_refers_to_the_span_before_and_one_that_names_none_is_left_out(record: Record) -> None:
    recorded = record()
    bad = [
        TraceLink("", ""),
        TraceLink("x" * 32, SPAN),
        TraceLink("0" * 32, SPAN),
        TraceLink(TRACE, "0" * 16),
        TraceLink(TRACE.upper(), SPAN),
        TraceLink(TRACE + "\n", SPAN),
    ]

    with start_span("a", links=[TraceLink(TRACE, SPAN), *bad]) as span:
        span.add_link(TraceLink(TRACE, "1" * 16))
        for link in bad:
            span.add_link(link)

    (found,) = recorded.spans
    assert [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in found.links] == [
        (TRACE, SPAN),
        (TRACE, "1" * 16),
    ]
    assert all(link.context.is_remote and link.context.trace_flags.sampled for link in found.links)


def test_a_trace_that_is_not_sampled_is_not_recorded_at_any_depth(record: Record) -> None:
    recorded = record()

    tracer = recorded.provider.get_tracer("engine")
    above = TraceContext(TRACE, SPAN, sampled=False)

    with start_span("a", parent=above), start_span("b"), tracer.start_as_current_span("c"):
        pass

    assert recorded.spans == []


def test_the_sampling_ratio_applies_to_new_traces_and_is_propagated(record: Record) -> None:
    recorded = record(ratio=0.0)

    with start_span("a") as root, start_span("b") as inner:
        assert not root.recording
    with start_span("c", parent=CALLER):
        pass

    assert inner.context.trace_id == root.context.trace_id
    assert inner.context.traceparent.endswith("-00")
    assert [span.name for span in recorded.spans] == ["c"]


def test_spans_of_opentelemetrys_own_api_are_part_of_the_tree(record: Record) -> None:
    recorded = record()
    tracer = recorded.provider.get_tracer("engine")

    with start_span("outer", parent=CALLER):
        with tracer.start_as_current_span("theirs"), start_span("inner") as inner:
            assert inner.context.trace_id == TRACE
            assert inner.context.tracestate == "rojo=1"
        with start_span("after"):
            pass

    outer, theirs = ids(recorded.one("outer"))[1], ids(recorded.one("theirs"))[1]
    assert parent_of(recorded.one("theirs")) == outer
    assert parent_of(recorded.one("inner")) == theirs
    assert parent_of(recorded.one("after")) == outer


def test_without_export_nothing_of_opentelemetry_is_imported() -> None:
    program = """
import sys
import dynamo_runtime.app, dynamo_runtime.worker.adapter, dynamo_runtime.telemetry.request_accounting
from dynamo_core import start_span
from dynamo_runtime.telemetry.export import configure_export, shutdown_export
assert configure_export("x") is False
with start_span("a") as span:
    span.set_attribute("x", 1)
assert shutdown_export()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    env = os.environ | {"OTEL_EXPORT_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, env=env)

    assert (done.stdout.strip(), done.stderr) == ("[]", "")
