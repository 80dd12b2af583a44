from __future__ import annotations

import contextvars

import pytest
from dynamo_core import tracing
from dynamo_core.tracing import (
    TraceContext,
    get_distributed_tracing_context,
    inject_trace_headers_into_map,
    parse_traceparent,
    parse_tracestate,
)
from hypothesis import given
from hypothesis import strategies as st

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def test_a_valid_traceparent_is_read() -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN, sampled=True)
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-02") == TraceContext(TRACE, SPAN, sampled=False)


def test_a_later_version_is_read_as_far_as_it_agrees() -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-comes-later") == TraceContext(TRACE, SPAN)
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01x",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-٠١",
    ],
)
def test_an_invalid_traceparent_is_ignored(value: str) -> None:
    assert parse_traceparent(value) is None


@given(st.text())
def test_no_text_breaks_the_parsers(value: str) -> None:
    parse_traceparent(value)
    parse_tracestate(value)


def test_tracestate_is_passed_on_without_blanks() -> None:
    assert (
        parse_tracestate("rojo=00f067, ,congo=t61rcWkgMzE\t,t1@sys=a b") == "rojo=00f067,congo=t61rcWkgMzE,t1@sys=a b"
    )


@pytest.mark.parametrize(
    "value",
    [
        "a",
        "A=1",
        "a=",
        "a=1,a=2",
        "a=1,b=\x01",
        "=1",
        "a=1=2",
        ",".join(f"k{n}=1" for n in range(33)),
        "a=" + "x" * 600,
    ],
)
def test_an_invalid_tracestate_is_left_out_as_a_whole(value: str) -> None:
    context = TraceContext.from_headers({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": value})

    assert context == TraceContext(TRACE, SPAN)


def test_a_child_keeps_the_trace_and_gets_a_span_of_its_own() -> None:
    parent = TraceContext(TRACE, SPAN, sampled=False, tracestate="a=1")

    child = parent.child()

    assert (child.trace_id, child.sampled, child.tracestate) == (TRACE, False, "a=1")
    assert child.span_id != SPAN
    assert parse_traceparent(child.traceparent) is not None


def test_headers_carry_a_context_over() -> None:
    context = TraceContext(TRACE, SPAN, tracestate="a=1")

    assert context.to_headers() == {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}
    assert TraceContext.from_headers(context.to_headers()) == context


def test_new_traces_differ_and_are_valid() -> None:
    contexts = [TraceContext.new() for _ in range(100)]

    assert len({context.trace_id for context in contexts}) == 100
    assert all(parse_traceparent(context.traceparent) == context for context in contexts)


def test_the_helpers_give_the_current_context() -> None:
    def inside() -> tuple[dict[str, str], dict[str, str]]:
        tracing.current.set(TraceContext(TRACE, SPAN, tracestate="a=1"))
        headers = {"accept": "x"}
        inject_trace_headers_into_map(headers)
        return get_distributed_tracing_context(), headers

    context, headers = contextvars.copy_context().run(inside)

    assert context == {"trace_id": TRACE, "span_id": SPAN, "trace_flags": "01", "tracestate": "a=1"}
    assert headers == {"accept": "x", "traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}


def test_outside_a_request_the_helpers_do_nothing() -> None:
    headers: dict[str, str] = {}

    inject_trace_headers_into_map(headers)

    assert headers == {}
    assert get_distributed_tracing_context() == {}
