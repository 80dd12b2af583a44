"""The measuring tools measure what they say."""

import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from dynamo_testing.ports import free_port
from dynamo_testing.tiny_model import make_tokenizer_folder
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.children import ChildFailed, Children, accepts, parts_of
from benchmarks.http1 import BadResponse, Connection, Endpoint, EventCounter, ResponseParser
from benchmarks.load import Measured, Target, measure
from benchmarks.meters import MetricsMeter, ProcessMeter, Usage, cpu_seconds
from benchmarks.probe import FIRST_TOKEN, TOKENS, ModelText, Remote, Text, inproc_front, serve_front, serve_worker
from benchmarks.report import Block, document, table
from benchmarks.runner import publish, run_plan
from benchmarks.scenarios import SCENARIOS, Scenario, chosen
from benchmarks.stats import Spread, percentile, ratio, spread

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
    """A server that answers the first request of each connection with `answer` and closes."""

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


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_the_half_percentile_is_the_median(values: list[float]) -> None:
    assert percentile(sorted(values), 0.5) == pytest.approx(statistics.median(values), abs=1e-6)


def test_percentiles_are_interpolated_between_neighbours() -> None:
    values = [float(number) for number in range(101)]

    assert percentile(values, 0.0) == 0.0
    assert percentile(values, 0.99) == pytest.approx(99.0)
    assert percentile(values, 0.995) == pytest.approx(99.5)
    assert percentile([4.0], 0.99) == 4.0


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_a_percentile_of_nothing_or_outside_the_range_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"percentile|share"):
        percentile(values, share)


def test_a_spread_leaves_out_what_is_not_known() -> None:
    assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([None]) is None


def test_a_ratio_needs_both_sides() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is None
    assert ratio(1.0, 0.0) is None


def test_an_unknown_scenario_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="no scenario 'drip'; there are unary-1"):
        chosen("flood,drip")


# --- the client


@given(body=st.binary(max_size=300), size=st.integers(1, 80), places=st.lists(st.integers(0, 2000), max_size=12))
def test_a_chunked_body_is_read_whole_however_it_is_cut(body: bytes, size: int, places: list[int]) -> None:
    raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(body, size)
    parser = ResponseParser()

    got = b"".join(parser.feed(piece) for piece in cut(raw, places))

    assert (parser.status, parser.done, parser.keep_alive, got) == (200, True, True, body)


@given(body=st.binary(max_size=300), places=st.lists(st.integers(0, 2000), max_size=12))
def test_a_body_with_a_length_is_read_whole_after_an_interim_answer(body: bytes, places: list[int]) -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    parser = ResponseParser()

    got = b"".join(parser.feed(piece) for piece in cut(head % len(body) + body, places))

    assert (parser.status, parser.done, parser.keep_alive, got) == (503, True, False, body)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = ResponseParser()

    got = parser.feed(b"HTTP/1.1 200 OK\r\n\r\nhalf")
    assert not parser.done
    parser.feed_eof()

    assert (got, parser.done, parser.keep_alive) == (b"half", True, False)


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
def test_what_is_not_a_response_is_refused(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseParser().feed(raw)


def test_a_connection_closed_in_the_middle_is_not_a_response() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")

    with pytest.raises(BadResponse, match="before the response was complete"):
        parser.feed_eof()


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


@pytest.mark.parametrize("url", ["https://h", "h:80", "http://"])
def test_a_url_that_cannot_be_measured_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http"):
        Endpoint.parse(url)


# --- the loop


@pytest.mark.parametrize("scenario", [UNARY, STREAM], ids=["unary", "stream"])
async def test_two_requests_against_the_probe_in_one_process_are_measured_without_an_error(scenario: Scenario) -> None:
    async with probe_server() as endpoint:
        measured = await measure(Target("probe", endpoint, "m", ProcessMeter(os.getpid())), scenario)

    assert measured.error_kinds == {}
    assert (measured.requests, measured.tokens) == (2, 2 * scenario.max_tokens)
    assert measured.cpu_per_1k_requests is not None
    assert measured.events_per_stream == (scenario.max_tokens + 4 if scenario.stream else None)


async def test_the_probe_as_worker_and_front_streams_every_token() -> None:
    worker = await serve_worker(0, 0.001)
    remote = Remote(Words())
    link = await remote.connect(worker.sockets[0].getsockname()[1])
    front = await serve_front(0, remote.front)
    async with worker, front:
        endpoint = Endpoint("127.0.0.1", front.sockets[0].getsockname()[1], "")
        measured = await measure(Target("probe", endpoint, "m", NoMeter()), STREAM)
        link.close()

    assert measured.error_kinds == {}
    assert measured.tokens == 2 * STREAM.max_tokens
    assert measured.cpu_per_1k_requests is None


async def test_the_probe_counts_the_tokens_of_the_model_and_gives_their_text(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "model", vocab_size=800)
    question = {"messages": [{"role": "user", "content": "ba ke"}], "max_tokens": 3}

    async with probe_server(text=ModelText(folder)) as endpoint:
        connection = await Connection.open(endpoint)
        request = endpoint.post("/v1/chat/completions", json.dumps(question).encode())
        reply = await connection.exchange(request, stream=False, timeout=10.0)
        connection.close()

    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = "<|im_start|>user\nba ke<|im_end|>\n<|im_start|>assistant\n"
    answer = json.loads(reply.body)
    made = [FIRST_TOKEN + number for number in (1, 2, 3)]
    assert answer["usage"]["prompt_tokens"] == len(library.encode(prompt, add_special_tokens=False).ids)
    assert answer["choices"][0]["message"]["content"] == "".join(library.decode([token]) for token in made)


@pytest.mark.parametrize(
    ("missing", "fault"),
    [
        (b"data: [DONE]\n\n", "without [DONE]"),
        (b'"finish_reason":"length"', "without a finish_reason"),
        (b',"usage":{"prompt_tokens":3,"completion_tokens":7}', "without the usage"),
        (b"", "7 completion tokens, not 8"),
    ],
)
async def test_a_stream_that_lacks_something_is_an_error(missing: bytes, fault: str) -> None:
    body = EVENTS.replace(missing, b"") if missing else EVENTS

    kinds = await errors_of(http(body, b"text/event-stream"), replace(STREAM, max_tokens=8))

    assert all(fault in kind for kind in kinds)
    assert sum(kinds.values()) >= 1


async def test_an_error_event_is_an_error_though_the_stream_ends_in_order() -> None:
    body = EVENTS.replace(b": a comment line", b'data: {"error": {"message": "worker lost"}}')

    kinds = await errors_of(http(body, b"text/event-stream"), replace(STREAM, max_tokens=7))

    assert all("worker lost" in kind for kind in kinds)
    assert sum(kinds.values()) >= 1


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (
            http(b'{"choices":[{"finish_reason":"stop"}],"usage":{"completion_tokens":3}}'),
            "3 completion tokens, not 16",
        ),
        (http(b'{"choices":[{}],"usage":{"completion_tokens":16}}'), "no finish_reason"),
        (http(b'{"detail":"x"}'), "not a chat completion"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "status 503: busy"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", "before the response was complete"),
    ],
)
async def test_a_wrong_unary_answer_is_an_error(answer: bytes, fault: str) -> None:
    kinds = await errors_of(answer, UNARY)

    assert all(fault in kind for kind in kinds)
    assert sum(kinds.values()) >= 1


async def test_a_request_that_is_never_answered_is_an_error_after_the_deadline() -> None:
    async with probe_server(step_s=30.0) as endpoint:
        target = Target("stuck", endpoint, "m", NoMeter(), request_timeout=0.05)
        measured = await measure(target, replace(UNARY, requests=1))

    assert measured.requests == 0
    assert list(measured.error_kinds) == ["no complete answer within 0.05 s"]


async def test_two_targets_are_measured_in_turn_and_compared() -> None:
    quick = replace(UNARY, seconds=0.05)
    async with probe_server() as one, probe_server() as two:
        targets = [Target("one", one, "m", NoMeter()), Target("two", two, "m", NoMeter())]
        blocks = await run_plan([(quick, targets)], rounds=2)

    assert [len(rounds) for rounds in blocks[0].rounds.values()] == [2, 2]
    assert "one / two" in table(blocks)


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


def test_the_document_holds_every_round_and_the_ratios() -> None:
    block = Block(UNARY, {"ours": [measured_at(10)], "probe": [measured_at(40)]})

    scenario = document([block], {"quick": True})["scenarios"]

    assert isinstance(scenario, list)
    assert scenario[0]["ratios"]["requests_per_second"]["median"] == 0.25
    assert scenario[0]["targets"][0]["rounds"][0]["requests"] == 10


def test_a_wrong_answer_makes_the_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Block(UNARY, {"x": [measured_at(1)]}), Block(UNARY, {"x": [measured_at(1, errors=2)]})

    assert publish([good], {}, None) == 0
    assert publish([good, bad], {}, tmp_path / "out.json") == 1

    assert "2 x status 500: x" in capsys.readouterr().out
    assert (tmp_path / "out.json").exists()


# --- processes


async def test_cpu_time_is_read_from_the_process_itself() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) == before:
        sum(range(10_000))

    usage = await ProcessMeter(os.getpid(), children=True).read()

    assert usage.cpu_seconds is not None
    assert usage.cpu_seconds > before
    assert usage.peak_rss_mib


async def test_cpu_time_is_read_from_the_metrics_page_when_there_is_no_pid() -> None:
    async with answering(http(b"# TYPE x\nprocess_cpu_seconds_total 12.5\n")) as endpoint:
        usage = await MetricsMeter(endpoint).read()

    assert usage == Usage(12.5, None)


async def test_a_server_without_a_metrics_page_has_no_cpu_figure() -> None:
    async with probe_server() as endpoint:
        usage = await MetricsMeter(endpoint).read()

    assert usage == Usage(None, None)


async def test_a_child_serves_while_its_block_runs_and_is_gone_after_it(tmp_path: Path) -> None:
    port = free_port()
    folder = str(make_tokenizer_folder(tmp_path / "model", vocab_size=800))
    command = [
        sys.executable,
        "-m",
        "benchmarks.probe",
        "front",
        "--port",
        str(port),
        "--inproc",
        "--model-dir",
        folder,
    ]

    async with Children(tmp_path, cpu=None) as children:
        pid = await children.start("probe", command, lambda: accepts(port))
        target = Target("probe", Endpoint("127.0.0.1", port, ""), "m", ProcessMeter(pid))
        measured = await measure(target, UNARY)

    assert measured.error_kinds == {}
    with pytest.raises(ProcessLookupError):
        cpu_seconds(pid)


async def test_the_processes_of_a_supervisor_are_known_by_their_parts() -> None:
    nap = "import time; print('up', flush=True); time.sleep(60)"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {nap!r}, '--only', 'frontend']).wait()"
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", start, start_new_session=True, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert supervisor.stdout is not None
        async with asyncio.timeout(20):
            await supervisor.stdout.readline()

        parts = parts_of(supervisor.pid)

        assert list(parts) == ["frontend"]
        assert cpu_seconds(parts["frontend"]) >= 0
    finally:
        os.killpg(supervisor.pid, signal.SIGKILL)
        await supervisor.wait()


async def test_a_child_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async with Children(tmp_path, cpu=None) as children:
        with pytest.raises(ChildFailed, match=r"broken ended with code 3\n    out of cheese"):
            await children.start("broken", [sys.executable, "-c", "print('out of cheese'); exit(3)"], never)
