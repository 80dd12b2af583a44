"""The measuring tools measure what they say."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.http1 import BadResponse, Endpoint, EventCounter, ResponseParser
from benchmarks.load import Measured, Target, measure
from benchmarks.meters import MetricsMeter, ProcessMeter, Usage
from benchmarks.probe import FIRST_TOKEN, TOKENS, Text, inproc_front, serve_front
from benchmarks.report import Block, table
from benchmarks.runner import publish
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.stats import percentile

UNARY = replace(SCENARIOS["unary-1"], requests=2)
STREAM = replace(SCENARIOS["flood"], clients=2, requests=2, max_tokens=20)

EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b": a comment line\n\n"
    b'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"x\\" \\ndata: [DONE]"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n'
    b"data: [DONE]\n\n"
)


class NoMeter:
    async def read(self) -> Usage:
        return Usage(None, None)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds) if start < end]


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%X;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: x\r\n\r\n"


class Words:
    """A text side without a tokenizer: a token for each byte, a letter for each token."""

    pieces = [b"x"] * (FIRST_TOKEN + TOKENS)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@asynccontextmanager
async def probe_server(step_s: float = 0.0, text: Text | None = None) -> AsyncIterator[Endpoint]:
    server = await serve_front(0, inproc_front(text or Words(), step_s))
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "")


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[Endpoint]:
    """Yield a server that answers the first request of each connection with `answer` and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "")


def http(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


async def errors_of(answer: bytes, scenario: Scenario) -> dict[str, int]:
    once = replace(scenario, clients=1, requests=1)
    async with answering(answer) as endpoint:
        measured = await measure(Target("bad", endpoint, "m", NoMeter(), request_timeout=5.0), once)
    return measured.error_kinds


# --- figures


def test_percentiles_are_interpolated_between_neighbours() -> None:
    values = [float(number) for number in range(101)]

    assert percentile(values, 0.0) == 0.0
    assert percentile(values, 0.99) == pytest.approx(99.0)
    assert percentile(values, 0.995) == pytest.approx(99.5)
    assert percentile([4.0], 0.99) == 4.0


# --- the client


@given(body=st.binary(max_size=300), size=st.integers(1, 80), places=st.lists(st.integers(0, 2000), max_size=12))
def test_a_chunked_body_is_read_whole_however_it_is_cut(body: bytes, size: int, places: list[int]) -> None:
    raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(body, size)
    parser = ResponseParser()

    got = b"".join(parser.feed(piece) for piece in cut(raw, places))

    assert (parser.status, parser.done, parser.keep_alive, got) == (200, True, True, body)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    ],
)
def test_an_invalid_response_is_refused(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseParser().feed(raw)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@given(places=st.lists(st.integers(0, 2000), max_size=20))
def test_events_and_the_ending_are_found_however_the_stream_is_cut(line_end: bytes, places: list[int]) -> None:
    counter = EventCounter()

    for piece in cut(EVENTS.replace(b"\n", line_end), places):
        counter.feed(piece, 1.0)

    ending = counter.ending()
    assert counter.events == 5
    assert (ending.done, ending.finish_reason, ending.completion_tokens, ending.error) == (True, "length", 7, None)


def test_the_first_content_is_not_the_role_and_not_an_empty_text() -> None:
    counter = EventCounter()

    for moment, line in enumerate(EVENTS.splitlines(keepends=True)):
        counter.feed(line, float(moment))

    assert counter.first_content == 4.0


def test_an_endpoint_is_read_from_a_base_url_with_or_without_v1() -> None:
    assert Endpoint.parse("http://h:81/a/v1/") == Endpoint.parse("http://h:81/a") == Endpoint("h", 81, "/a")
    assert Endpoint("h", 81, "/a").post("/v1/x", b"{}").startswith(b"POST /a/v1/x HTTP/1.1\r\nHost: h:81\r\n")


# --- the loop


@pytest.mark.parametrize("scenario", [UNARY, STREAM], ids=["unary", "stream"])
async def test_two_requests_against_the_probe_in_one_process_are_measured_without_an_error(scenario: Scenario) -> None:
    async with probe_server() as endpoint:
        measured = await measure(Target("probe", endpoint, "m", ProcessMeter(os.getpid())), scenario)

    assert measured.error_kinds == {}
    assert (measured.requests, measured.tokens) == (2, 2 * scenario.max_tokens)
    assert measured.cpu_per_1k_requests is not None
    assert measured.events_per_stream == (scenario.max_tokens + 4 if scenario.stream else None)


SERVED = http(EVENTS, b"text/event-stream")


@pytest.mark.parametrize(
    ("answer", "tokens", "fault"),
    [
        (SERVED.replace(b"data: [DONE]\n\n", b""), 8, "before the response was complete"),
        (http(EVENTS.replace(b"data: [DONE]\n\n", b""), b"text/event-stream"), 8, "without [DONE]"),
        (http(EVENTS.replace(b'"finish_reason":"length"', b""), b"text/event-stream"), 8, "without a finish_reason"),
        (SERVED, 8, "7 completion tokens, not 8"),
        (
            http(EVENTS.replace(b": a", b'data: {"error": {"message": "worker lost"}}\n: a'), b"text/event-stream"),
            7,
            "worker lost",
        ),
        (http(b'{"choices":[{}],"usage":{"completion_tokens":16}}'), None, "no finish_reason"),
        (http(b'{"detail":"x"}'), None, "not a chat completion"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", None, "status 503: busy"),
    ],
)
async def test_a_wrong_answer_is_an_error(answer: bytes, tokens: int | None, fault: str) -> None:
    kinds = await errors_of(answer, UNARY if tokens is None else replace(STREAM, max_tokens=tokens))

    assert kinds
    assert all(fault in kind for kind in kinds)


async def test_a_request_that_is_never_answered_is_an_error_after_the_deadline() -> None:
    async with probe_server(step_s=30.0) as endpoint:
        target = Target("stuck", endpoint, "m", NoMeter(), request_timeout=0.05)
        measured = await measure(target, replace(UNARY, requests=1))

    assert measured.requests == 0
    assert list(measured.error_kinds) == ["no complete answer within 0.05 s"]


# --- the report


def measured_at(rate: float, errors: int = 0) -> Measured:
    kinds = {"status 500: x": errors} if errors else {}
    figures = (rate, rate * 16, 1.0, 2.0, 1.0, 2.0, 0.5, 0.25, 0.4, 30.0, None, 0.3)
    return Measured(10, 160, 1.0, errors, kinds, *figures)


def test_the_table_shows_medians_extremes_and_the_ratio_of_rounds() -> None:
    block = Block(UNARY, {"ours": [measured_at(10), measured_at(30), measured_at(20)], "probe": [measured_at(40)] * 3})

    line = next(line for line in table([block]).splitlines() if line.startswith("requests/s"))

    assert "20.0 (10.0–30.0)" in line
    assert "0.50 (0.25–0.75)" in line


def test_a_wrong_answer_makes_the_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Block(UNARY, {"x": [measured_at(1)]}), Block(UNARY, {"x": [measured_at(1, errors=2)]})

    assert publish([good], {}, None) == 0
    assert publish([good, bad], {}, tmp_path / "out.json") == 1

    assert "2 x status 500: x" in capsys.readouterr().out
    assert (tmp_path / "out.json").exists()


# --- processes


async def test_cpu_time_is_read_from_the_metrics_page_when_there_is_no_pid() -> None:
    async with answering(http(b"# TYPE x\nprocess_cpu_seconds_total 12.5\n")) as endpoint:
        usage = await MetricsMeter(endpoint).read()

    assert usage == Usage(12.5, None)
