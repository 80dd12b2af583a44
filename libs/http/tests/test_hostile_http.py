"""Raw sockets against a real listener: what is no HTTP, what two servers could read differently, who takes for ever."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import http_parser, web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.errors import ConfigError, Problem
from dynamo_http.connection import MAX_FIELD, MAX_HEADERS

from libs.http.tests.serving import answer_to, closed, connect, make, until

HEAD = b"POST /read HTTP/1.1\r\nHost: x\r\n"
NEXT = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"


class House:
    """A listener whose handlers note what reached them."""

    def __init__(self, **options: Any) -> None:
        self.reached: list[str] = []
        routes = [
            HttpRoute("POST", "/read", self._read),
            HttpRoute("POST", "/pieces", self._pieces),
            HttpRoute("POST", "/late", self._late),
            HttpRoute("GET", "/hidden", self._hidden),
            HttpRoute("GET", "/large", self._large),
        ]
        self.listener = make(*routes, **options)

    async def _read(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.reached.append("read")
        return web.Response(text=f"{len(body)}")

    async def _pieces(self, request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            self.reached.append("piece")
        return web.Response()

    async def _late(self, request: web.Request) -> web.Response:
        await request.content.wait_eof()
        await asyncio.sleep(0.1)  # the deadline of the test passes
        return web.Response(body=await request.read())

    async def _hidden(self, request: web.Request) -> web.Response:
        self.reached.append("hidden")
        return web.Response(text="hidden")

    async def _large(self, request: web.Request) -> web.Response:
        self.reached.append("large")
        return web.Response(body=bytes(8 * 1024 * 1024))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connect(self.listener)
        return reader, writer

    async def answer(self, *pieces: bytes) -> bytes:
        return await answer_to(self.listener, *pieces)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[House]:
    house = House(**options)
    async with house.listener:
        await house.listener.start()
        yield house


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with serving() as house:
        yield house


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def told(answer: bytes, code: int) -> dict[str, Any]:
    """Return the error of a refusal; it is one of HTTP/1.1 with a JSON body, has an id, and closes the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
    assert first.startswith(b"HTTP/1.1 %d " % code)
    assert headers[b"content-type"].startswith(b"application/json")
    assert headers[b"connection"] == b"close"
    assert headers[b"x-request-id"]
    assert b"server" not in headers
    flat: dict[str, Any] = json.loads(body)
    assert flat["code"] == code
    assert flat["error"]["message"] == flat["message"]
    return flat


# What could be taken for two requests, or for another one: refused, and the connection is closed.

SMUGGLING = {
    "TE and CL": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + NEXT,
    "CL and TE": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello" + NEXT,
    "one length twice": HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello" + NEXT,
    "a list of lengths": HEAD + b"Content-Length: 5, 5\r\n\r\nhello" + NEXT,
    "a length with a sign": HEAD + b"Content-Length: +5\r\n\r\nhello" + NEXT,
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\nhello" + NEXT,
    "a hexadecimal length": HEAD + b"Content-Length: 0x5\r\n\r\nhello" + NEXT,
    "a length with an underscore": HEAD + b"Content-Length: 1_0\r\n\r\nhellohello" + NEXT,
    "a length beyond all numbers": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + NEXT,
    "a space before the colon": HEAD + b"Content-Length : 5\r\n\r\nhello" + NEXT,
    "bare line feeds": b"GET /hidden HTTP/1.1\nHost: x\n\n" + NEXT,
    "a bare line feed in a header": b"GET /hidden HTTP/1.1\r\nHost: x\nFoo: y\r\n\r\n" + NEXT,
    "a bare line feed at the end": b"GET /hidden HTTP/1.1\r\nHost: x\r\n\n" + NEXT,
    "a bare carriage return": b"GET /hidden HTTP/1.1\r\nHost: x\rFoo: y\r\n\r\n" + NEXT,
    "a folded header": b"GET /hidden HTTP/1.1\r\nHost: x\r\nFoo: y\r\n z\r\n\r\n" + NEXT,
    "a folded TE": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + NEXT,
    "a space before the first header": b"GET /hidden HTTP/1.1\r\n Host: x\r\n\r\n" + NEXT,
    "NUL in a header": b"GET /hidden HTTP/1.1\r\nHost: x\r\nFoo: a\x00b\r\n\r\n" + NEXT,
    "a header without a name": b"GET /hidden HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n" + NEXT,
    "an unknown TE": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + NEXT,
    "chunked not last": HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + NEXT,
    "chunked not alone": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + NEXT,
    "TE twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT,
    "TE identity": HEAD + b"Transfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello" + NEXT,
    "TE after a vertical tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + NEXT,
    "TE in HTTP/1.0": b"POST /read HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + NEXT,
    "no host": b"GET /hidden HTTP/1.1\r\n\r\n" + NEXT,
    "two hosts": b"GET /hidden HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n" + NEXT,
    "HTTP/1.2": b"GET /hidden HTTP/1.2\r\nHost: x\r\n\r\n" + NEXT,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + NEXT,
    "a method in small letters": b"get /hidden HTTP/1.1\r\nHost: x\r\n\r\n" + NEXT,
    "tabs in the first line": b"GET\t/hidden\tHTTP/1.1\r\nHost: x\r\n\r\n" + NEXT,
    "a space in the path": b"GET /hid den HTTP/1.1\r\nHost: x\r\n\r\n" + NEXT,
}

BROKEN_CHUNKS = {
    "no number": b"xyz\r\nhello\r\n0\r\n\r\n",
    "a prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a sign": b"-5\r\nhello\r\n0\r\n\r\n",
    "beyond all numbers": b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "a space after the size": b"5 \r\nhello\r\n0\r\n\r\n",
    "a bare line feed after the size": b"5\nhello\r\n0\r\n\r\n",
    "a bare line feed in an extension": b"5;a\nhello\r\n0\r\n\r\n",
    "a bare carriage return in an extension": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
    "more data than the size": b"5\r\nhelloXX0\r\n\r\n",
    "a length behind the body": b"5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n",
    "headers without end behind the body": b"5\r\nhello\r\n0\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
}


@pytest.mark.parametrize("name", SMUGGLING)
async def test_request_smuggling_is_refused_and_the_connection_closed(
    house: House, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await house.answer(SMUGGLING[name])

    told(answer, 400)
    assert b"hidden" not in answer
    assert answer.count(b"HTTP/1.") - answer.partition(b"\r\n\r\n")[2].count(b"HTTP/1.") == 1
    assert house.reached == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", BROKEN_CHUNKS)
@pytest.mark.parametrize("together", [True, False], ids=["with the header", "after it"])
async def test_a_broken_chunk_is_refused_and_the_connection_closed(
    house: House, name: str, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    body = BROKEN_CHUNKS[name] + NEXT

    answer = await (house.answer(head + body) if together else house.answer(head, body))

    told(answer, 431 if together and "headers" in name else 400)
    assert house.reached == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_http_0_9_is_refused(house: House) -> None:
    answer = await house.answer(b"GET /hidden\r\n\r\n")

    assert told(answer, 400)["message"] == "HTTP/0.9 is not spoken here"
    assert house.reached == []


async def test_a_wrong_content_encoding_is_a_400(house: House, caplog: pytest.LogCaptureFixture) -> None:
    answer = await house.answer(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello")

    assert status(answer) == 400
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"anything"])
async def test_an_upgrade_request_is_ignored(house: House, offer: bytes) -> None:
    upgrade = b"GET /hidden HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: %b\r\n\r\n" % offer

    answer = await house.answer(upgrade + NEXT)

    assert status(answer) == 200
    assert house.reached == ["hidden"]


async def test_connect_requests_are_not_proxied(house: House) -> None:
    answer = await house.answer(b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n" + NEXT)

    assert status(answer) == 404
    assert house.reached == []


@pytest.mark.parametrize(
    "head",
    [
        b"GET /hidden HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * MAX_HEADERS + b"\r\n",
        b"GET /hidden HTTP/1.1\r\nHost: x\r\na: " + b"b" * (MAX_FIELD + 1) + b"\r\n\r\n",
        b"GET /hidden HTTP/1.1\r\nHost: x\r\n" + b"a" * (MAX_FIELD + 1) + b": b\r\n\r\n",
        b"GET /" + b"h" * (MAX_FIELD + 1) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["too many headers", "a long value", "a long name", "a long path"],
)
async def test_headers_are_bounded(house: House, head: bytes) -> None:
    answer = await house.answer(head)

    message = told(answer, 431)["message"]
    assert str(MAX_HEADERS) in message
    assert str(MAX_FIELD) in message
    assert b"b" * 64 not in answer
    assert b"h" * 64 not in answer
    assert house.reached == []


async def test_non_http_is_refused_by_respond_error() -> None:
    def respond_error(problem: Problem) -> web.Response:
        return web.json_response({"own": problem.status}, status=problem.status)

    async with serving(respond_error=respond_error) as house:
        answer = await house.answer(b"nonsense\r\n\r\n")

    assert status(answer) == 400
    assert answer.endswith(b'{"own": 400}')


# Who takes for ever.


async def test_a_header_that_comes_byte_by_byte_is_cut_at_the_deadline() -> None:
    async with serving(header_timeout=0.2) as house:
        reader, writer = await house.connect()

        async def drip() -> None:
            for byte in b"GET /hidden HTTP/1.1\r\nX: " + b"x" * 10_000:
                # What arrives after the end would be answered by a reset, which takes the answer along.
                if writer.is_closing() or house.listener.timed_out_connections:
                    return
                writer.write(bytes([byte]))
                await asyncio.sleep(0.005)

        dripping = asyncio.create_task(drip())
        answer = await closed(reader)
        dripping.cancel()
        writer.close()

        told(answer, 408)
        assert house.listener.timed_out_connections == 1
        assert house.reached == []


@pytest.mark.parametrize("start", [b"", b"\r\n\r\n", b"\r\n" * 1000], ids=["nothing", "an empty line", "empty lines"])
async def test_an_incomplete_header_is_cut_at_the_deadline(start: bytes) -> None:
    async with serving(header_timeout=0.1) as house:
        answer = await house.answer(start + b"GET /hidden HTTP/1.1\r\nHost: x\r\n")

        assert status(answer) == 408
        assert house.listener.timed_out_connections == 1


@pytest.mark.parametrize("path", ["/read", "/pieces"], ids=["read whole", "read in pieces"])
@pytest.mark.parametrize(
    "begin",
    [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 100_000],
    ids=["half a body", "a chunk extension without end"],
)
async def test_an_incomplete_body_is_cut_at_the_deadline(path: str, begin: bytes) -> None:
    async with serving(body_timeout=0.1) as house:
        answer = await house.answer(b"POST %s HTTP/1.1\r\nHost: x\r\n%s" % (path.encode(), begin))

        assert "did not arrive within 0.1 s" in told(answer, 408)["message"]
        assert "read" not in house.reached


async def test_a_body_that_came_in_time_may_be_read_after_the_deadline() -> None:
    async with serving(body_timeout=0.05) as house:
        answer = await house.answer(
            b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\n", b"abc"
        )

        assert status(answer) == 200


async def test_empty_lines_before_a_request_are_passed_over(house: House) -> None:
    answer = await house.answer(b"\r\n\r\n", b"\r\nGET /hidden HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert status(answer) == 200


async def test_half_a_second_header_is_cut_when_the_connection_has_been_idle_for_long() -> None:
    async with serving(idle_timeout=0.2) as house:
        answer = await house.answer(NEXT, b"GET /hidden HTTP/1.1\r\nHost: x\r\n")

        assert answer.count(b"HTTP/1.1 200") == 1
        assert house.reached == ["hidden"]


@pytest.mark.parametrize("ending", [b"", b"Connection: close\r\n"], ids=["kept open", "to be closed"])
async def test_a_reader_that_stops_is_cut(ending: bytes) -> None:
    async with serving(write_stall=0.2) as house:
        with slow_socket(house) as sock:
            await asyncio.get_running_loop().sock_sendall(
                sock, b"GET /large HTTP/1.1\r\nHost: x\r\n" + ending + b"\r\n"
            )
            await until(lambda: house.listener.stalled_connections == 1)
            await until(lambda: house.listener.connections == 0 and house.listener.running == 0)

        assert house.reached == ["large"]


async def test_a_reader_that_is_only_slow_is_not_cut() -> None:
    async with serving(write_stall=0.2) as house:
        with slow_socket(house) as sock:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            begun = loop.time()
            while loop.time() < begun + 1:
                assert await loop.sock_recv(sock, 4096)
                await asyncio.sleep(0.01)

            assert house.listener.stalled_connections == 0
            assert house.listener.connections == 1


async def test_pipelined_requests_with_unread_answers_do_not_pile_up() -> None:
    async with serving(write_stall=0.2) as house:
        _, writer = await house.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000)

        await until(lambda: house.listener.stalled_connections == 1)

        assert len(house.reached) < 10
        writer.transport.abort()


def slow_socket(house: House) -> socket.socket:
    """Return a connection whose kernel takes little for a client that does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", house.listener.port))
    sock.setblocking(False)
    return sock


# Crowds.


async def test_a_burst_of_connections_is_served_up_to_the_limit() -> None:
    async with serving(max_connections=20, header_timeout=30) as house:
        pairs = await asyncio.gather(*(house.connect() for _ in range(200)))
        await until(lambda: house.listener.refused_connections == 180)
        for reader, writer in pairs:
            if not reader.at_eof():
                writer.write(b"GET /hidden HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = await asyncio.gather(*(closed(reader) for reader, _ in pairs))
        for _, writer in pairs:
            writer.close()

        assert sum(b" 200 " in answer for answer in answers) == 20
        assert len(house.reached) == 20
        await until(lambda: house.listener.connections == 0)
        assert status(await house.answer(NEXT.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) == 200


# The parser.


async def test_the_c_parser_is_in_use(house: House) -> None:
    assert http_parser.HttpRequestParser is not http_parser.HttpRequestParserPy


async def test_without_the_c_parser_only_loopback_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_parser, "HttpRequestParserPy", http_parser.HttpRequestParser)

    async with serving():
        warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(ConfigError, match=r"will not serve the network on 0\.0\.0\.0:\d+: aiohttp runs without its C"):
        async with serving(host="0.0.0.0"):
            raise AssertionError("it serves")

    assert len(warned) == 1
    assert "C parser" in warned[0]
