from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.errors import ConfigError, InvalidArgument, Problem, Unknown
from dynamo_http.listener import Listener
from yarl import URL

from libs.http.tests.serving import MEGABYTE, answer_to, closed, connect, make, serving, until


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


async def read_body(request: web.Request) -> web.Response:
    return web.json_response({"size": len(await request.read())})


HELLO = HttpRoute("GET", "/hello", hello)
READ = HttpRoute("POST", "/read", read_body)


class Blocker:
    """A handler that runs until it is told to go on, and says what happened to it."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, _: web.Request) -> web.Response:
        self.entered.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return web.Response(text="done")

    async def enter(self, listener: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection of a request that is in the handler."""
        reader, writer = await connect(listener, b"GET /block HTTP/1.1\r\nHost: x\r\n\r\n")
        await self.entered.wait()
        return reader, writer

    def route(self) -> HttpRoute:
        return HttpRoute("GET", "/block", self)


async def test_a_route_is_served_on_the_port_that_was_free(client: aiohttp.ClientSession) -> None:
    async with serving(HELLO) as listener, client.get(f"{listener.url}/hello") as response:
        assert listener.port > 0
        assert listener.url == f"http://127.0.0.1:{listener.port}"
        assert (response.status, await response.text()) == (200, "hello")


async def streamed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"x")
    return response


async def failing(_: web.Request) -> web.Response:
    raise RuntimeError("no")


NAMED = (
    HELLO,
    HttpRoute("GET", "/item/{id}", hello),
    HttpRoute("GET", "/stream", streamed),
    HttpRoute("GET", "/fails", failing),
    HttpRoute("POST", "/read", read_body),
)
ASKED = [
    ("GET", "/hello", {}, 200),
    ("HEAD", "/hello", {}, 200),
    ("GET", "/item/3", {}, 200),
    ("GET", "/stream", {}, 200),
    ("GET", "/hello", {"origin": "https://elsewhere.example"}, 200),
    ("GET", "/nope", {}, 404),
    ("DELETE", "/hello", {}, 405),
    ("GET", "/fails", {}, 500),
    ("POST", "/read", {"transfer-encoding": "gzip, chunked"}, 400),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), ASKED)
async def test_every_answer_has_a_request_id_the_clients_own_if_it_sent_one(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with serving(*NAMED) as listener:
        answers = []
        for own in ({}, {}, {"x-request-id": "abc-1"}):
            body = "0\r\n\r\n" if method == "POST" else ""
            head = "".join(f"{name}: {value}\r\n" for name, value in (headers | own).items())
            answers.append(
                await said(listener, f"{method} {path} HTTP/1.1\r\nHost: x\r\n{head}Connection: close\r\n\r\n{body}")
            )

    first, second, echoed = (answer[1]["x-request-id"] for answer in answers)
    assert [answer[0] for answer in answers] == [status] * 3
    assert re.fullmatch(r"[0-9a-f-]{36}", first)
    assert first != second
    assert echoed == "abc-1"
    # Whose versions it is made of is nobody's business.
    assert not any("server" in answer[1] for answer in answers)


@pytest.mark.parametrize("own", ["", "a b", "é", "x" * 257], ids=["empty", "space", "not ASCII", "long"])
async def test_a_request_id_that_cannot_be_one_is_replaced(own: str) -> None:
    async with serving(HELLO) as listener:
        request = f"GET /hello HTTP/1.1\r\nHost: x\r\nX-Request-Id: {own}\r\nConnection: close\r\n\r\n"
        _, headers = await said(listener, request)

    assert re.fullmatch(r"[0-9a-f-]{36}", headers["x-request-id"])


async def said(listener: Listener, request: str) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of an answer."""
    head = (await answer_to(listener, request.encode())).partition(b"\r\n\r\n")[0].decode()
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


async def test_expect_continue_is_answered() -> None:
    async with serving(HttpRoute("POST", "/body", read_body)) as listener:
        reader, writer = await connect(
            listener, b"POST /body HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        async with asyncio.timeout(10):
            told = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"hi")
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()

    assert told.startswith(b"HTTP/1.1 100 ")
    assert head.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/hello", "/hello?a=1", "/h%65llo"])
async def test_a_path_is_found_however_it_is_written(client: aiohttp.ClientSession, path: str) -> None:
    async with serving(HttpRoute("GET", "/hello", hello)) as listener:
        response = await client.get(URL(listener.url + path, encoded=True))
        status = response.status

    assert status == 200


async def test_a_handlers_own_404_passes(client: aiohttp.ClientSession) -> None:
    async def nothing(_: web.Request) -> web.Response:
        raise web.HTTPNotFound(reason="No such thing")

    async with serving(HttpRoute("GET", "/thing", nothing)) as listener:
        response = await client.get(f"{listener.url}/thing")
        answer = await response.json()

    assert response.status == 404
    assert answer["message"] == "No such thing"


async def test_an_unknown_route_is_named_in_our_error_body(client: aiohttp.ClientSession) -> None:
    async with serving(HELLO) as listener, client.get(f"{listener.url}/nope?key=secret") as response:
        body = await response.json()

    assert response.status == 404
    assert body["message"] == "Route not found: GET /nope"
    assert body["error"]["message"] == body["message"]
    assert (body["code"], body["type"]) == (404, "not_found_error")


async def test_a_wrong_method_gets_405_with_allow(client: aiohttp.ClientSession) -> None:
    async with serving(READ) as listener, client.delete(f"{listener.url}/read") as response:
        body = await response.json()

    assert response.status == 405
    assert response.headers["Allow"] == "POST"
    assert body["code"] == 405


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_refused(client: aiohttp.ClientSession, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100_000

    data: Any = parts() if chunked else io.BytesIO(b"x" * (2 * MEGABYTE + 1))
    async with (
        serving(READ, body_limit=2 * MEGABYTE) as listener,
        client.post(f"{listener.url}/read", data=data) as response,
    ):
        body = await response.json()

    assert response.status == 413
    assert body["message"] == "Request body exceeds the limit of 2 MB set by DYN_HTTP_BODY_LIMIT_MB"


async def test_a_declared_oversized_body_is_refused_before_it_is_sent() -> None:
    async with serving(READ) as listener:
        reader, writer = await connect(listener, b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
        async with asyncio.timeout(5):
            status = await reader.readline()
        writer.close()

    assert b" 413 " in status


async def test_a_body_of_exactly_the_limit_is_accepted(client: aiohttp.ClientSession) -> None:
    async with (
        serving(READ, body_limit=1000) as listener,
        client.post(f"{listener.url}/read", data=b"x" * 1000) as response,
    ):
        assert (response.status, await response.json()) == (200, {"size": 1000})


async def test_an_unexpected_error_is_a_plain_500_and_is_logged(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: web.Request) -> web.Response:
        raise ValueError("secret detail")

    async with (
        serving(HttpRoute("GET", "/fail", fail)) as listener,
        client.get(f"{listener.url}/fail") as response,
    ):
        body = await response.text()

    assert response.status == 500
    assert json.loads(body)["message"] == "Internal server error"
    assert "secret" not in body
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == ["GET /fail failed"]


async def test_an_error_of_the_tree_is_answered_by_its_kind(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        raise InvalidArgument("model must be a text", field="model")

    async def fail(_: web.Request) -> web.Response:
        raise Unknown("secret detail")

    async with serving(HttpRoute("GET", "/refuse", refuse), HttpRoute("GET", "/fail", fail)) as listener:
        async with client.get(f"{listener.url}/refuse") as response:
            refused = await response.json()
        logged = list(caplog.records)
        async with client.get(f"{listener.url}/fail") as response:
            failed = await response.json()

    assert (refused["code"], refused["error"]["param"]) == (400, "model")
    assert [record for record in logged if record.levelno >= logging.ERROR] == []
    assert (failed["code"], failed["message"]) == (500, "Internal server error")
    assert "GET /fail failed" in caplog.text


async def test_an_error_after_the_first_byte_cuts_the_answer(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise ValueError("broke")

    async with serving(HttpRoute("GET", "/half", half)) as listener, client.get(f"{listener.url}/half") as response:
        first = await response.content.readexactly(4)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()

    assert first == b"half"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "GET /half failed in the middle of its answer"
    ]


async def test_a_redirect_of_a_handler_passes(client: aiohttp.ClientSession) -> None:
    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("/hello")

    async with (
        serving(HELLO, HttpRoute("GET", "/old", elsewhere)) as listener,
        client.get(f"{listener.url}/old") as response,
    ):
        assert await response.text() == "hello"


async def test_the_listener_cancels_a_handler_when_its_client_disconnects() -> None:
    blocker = Blocker()
    async with serving(blocker.route()) as listener:
        _, writer = await blocker.enter(listener)

        writer.transport.abort()
        await asyncio.wait_for(blocker.cancelled.wait(), 5)
        await until(lambda: listener.running == 0 and listener.connections == 0)


async def test_a_client_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    left = asyncio.Event()
    ended = asyncio.Event()

    async def chatter(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 1000)
                await asyncio.sleep(0)
        finally:
            ended.set()

    async with serving(HttpRoute("GET", "/chatter", chatter)) as listener:
        reader, writer = await connect(listener, b"GET /chatter HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readexactly(10)
        left.set()
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 5)
        await until(lambda: listener.running == 0)

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_write_to_a_connection_that_closes_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    written = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.close()
        written.set()
        await response.write(b"too late")
        return response

    async with serving(HttpRoute("GET", "/late", late)) as listener:
        await answer_to(listener, b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")

    assert written.is_set()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_port_in_use_is_one_line_with_the_remedy() -> None:
    async with serving(HELLO) as listener:
        second = make(HELLO, port=listener.port)

        with pytest.raises(ConfigError) as caught:
            await second.start()

    assert str(caught.value) == (
        f"the public listener cannot listen on 127.0.0.1:{listener.port}: the port is in use; "
        "end the process that holds it, or choose another port with --http-port"
    )
    await second.aclose()


async def test_an_address_of_another_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: this host has no such address"):
        await make(HELLO, host="192.0.2.1").start()


@pytest.mark.parametrize("port", [70000, -1])
async def test_an_invalid_port_is_a_config_error(port: int) -> None:
    with pytest.raises(ConfigError, match="not a port"):
        await make(HELLO, port=port).start()


def test_the_same_route_twice_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot serve GET /hello"):
        make(HELLO, HELLO)


async def test_loopback_is_quiet_and_the_network_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(HELLO) as listener:
        assert listener.exposure == "loopback"
    quiet = [record for record in caplog.records if record.levelno >= logging.WARNING]

    async with serving(HELLO, host="0.0.0.0") as listener:
        assert listener.exposure == "network"
        assert listener.url == f"http://127.0.0.1:{listener.port}"
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    assert quiet == []
    assert len(warned) == 1
    assert "open to the network" in warned[0]


async def test_connections_over_the_cap_are_closed_at_once_and_room_comes_back() -> None:
    async with serving(HELLO, max_connections=3) as listener:
        pairs = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3)]
        for _, writer in pairs[:2]:
            writer.write(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: listener.connections == 2)

        over, over_writer = await asyncio.open_connection("127.0.0.1", listener.port)
        refused = await closed(over)
        over_writer.close()
        for _, writer in pairs:
            writer.close()
        await until(lambda: listener.connections == 0)

        async with aiohttp.ClientSession() as client, client.get(f"{listener.url}/hello") as response:
            assert response.status == 200
        assert refused == b""
        assert listener.refused_connections == 1


async def test_a_header_may_come_in_pieces() -> None:
    async with serving(READ) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nConnection: close\r\n\r\nab":
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: listener.connections == 1)
        writer.write(b"cd")
        answer = await closed(reader)
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"size": 4}')


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    async with serving(HELLO, idle_timeout=0.05) as listener:
        answer = await answer_to(listener, b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")

    assert answer.endswith(b"hello")


async def test_client_that_says_nothing_is_cut_at_the_deadline() -> None:
    async with serving(HELLO, header_timeout=0.05) as listener:
        assert await answer_to(listener) == b""
        assert listener.timed_out_connections == 1


async def test_a_drain_finishes_running_requests_and_accepts_no_new_ones() -> None:
    blocker = Blocker()
    async with serving(HELLO, blocker.route()) as listener:
        busy, busy_writer = await blocker.enter(listener)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", listener.port)
        idle_writer.write(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
        await idle.readuntil(b"hello")
        fresh, fresh_writer = await asyncio.open_connection("127.0.0.1", listener.port)

        drain = asyncio.create_task(listener.drain_and_close(30))
        assert await closed(idle) == b""
        assert await closed(fresh) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)
        assert not drain.done()
        blocker.go_on.set()
        answer = await closed(busy)
        await asyncio.wait_for(drain, 5)
        for writer in (busy_writer, idle_writer, fresh_writer):
            writer.close()

    assert answer.endswith(b"done")
    assert b"Connection: close" in answer
    assert not blocker.cancelled.is_set()


async def test_a_request_that_arrived_just_before_a_drain_is_answered() -> None:
    async with serving(HELLO) as listener:
        reader, writer = await connect(listener, b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"hello")

        writer.write(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
        await listener.drain_and_close(5)
        answer = await closed(reader)
        writer.close()

    assert answer.endswith(b"hello")


async def test_a_drain_cancels_requests_that_exceed_its_time() -> None:
    blocker = Blocker()
    async with serving(blocker.route()) as listener:
        reader, writer = await blocker.enter(listener)

        await asyncio.wait_for(listener.drain_and_close(0.01), 5)

        assert blocker.cancelled.is_set()
        assert await closed(reader) == b""
        assert (listener.running, listener.connections) == (0, 0)
        writer.close()


async def test_closing_cuts_a_drain_short_and_is_safe_twice() -> None:
    blocker = Blocker()
    listener = make(blocker.route())
    await listener.start()
    reader, writer = await blocker.enter(listener)
    drain = asyncio.create_task(listener.drain_and_close(3600))
    await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(listener.aclose(), listener.aclose()), 5)
    await asyncio.wait_for(drain, 5)
    await listener.aclose()

    assert blocker.cancelled.is_set()
    await closed(reader)
    writer.close()


async def test_a_listener_that_was_never_started_can_be_closed() -> None:
    listener = make(HELLO)

    await listener.aclose()
    await listener.drain_and_close(1)


async def test_many_requests_at_once_leave_nothing_behind(client: aiohttp.ClientSession) -> None:
    async with serving(HELLO, READ) as listener:

        async def once(number: int) -> int:
            path = "/hello" if number % 2 else "/nope"
            async with client.get(f"{listener.url}{path}") as response:
                await response.read()
                return response.status

        statuses = await asyncio.gather(*(once(number) for number in range(200)))
        await until(lambda: listener.running == 0)

    assert sorted(set(statuses)) == [200, 404]
    assert listener.connections == 0


async def test_the_listeners_refusals_can_be_customized(client: aiohttp.ClientSession) -> None:
    def respond_error(problem: Problem) -> web.Response:
        return web.json_response({"mine": problem.message.split(":")[0]}, status=problem.status)

    async def breaks(_: web.Request) -> web.Response:
        raise RuntimeError("on purpose")

    async with serving(
        READ, HttpRoute("GET", "/breaks", breaks), respond_error=respond_error, body_limit=10
    ) as listener:
        for method, path, status, says in (
            ("GET", "/nope", 404, "Route not found"),
            ("GET", "/read", 405, "Method not allowed"),
            ("POST", "/read", 413, "Request body exceeds the limit of 9.53674e-06 MB set by DYN_HTTP_BODY_LIMIT_MB"),
            ("GET", "/breaks", 500, "Internal server error"),
        ):
            async with client.request(method, listener.url + path, data=b"x" * 11 if status == 413 else None) as answer:
                assert (answer.status, await answer.json()) == (status, {"mine": says})
                assert answer.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_while_the_process_starts_only_early_routes_are_answered(client: aiohttp.ClientSession) -> None:
    early = HttpRoute("GET", "/live", hello, before_ready=True)
    listener = make(early, HELLO, READ)
    await listener.start(starting=True)
    try:
        asked = [("GET", "/live"), ("HEAD", "/live"), ("GET", "/hello"), ("POST", "/read"), ("GET", "/nothing")]

        async def statuses() -> list[int]:
            found = []
            for method, path in asked:
                async with client.request(method, listener.url + path, data=b"x" if method == "POST" else None) as told:
                    found.append(told.status)
                    if told.status == 503:
                        assert told.headers["Retry-After"] == "1"
                        assert "is starting" in await told.text()
            return found

        before = await statuses()
        listener.started()
        after = await statuses()
    finally:
        await listener.aclose()

    assert before == [200, 200, 503, 503, 503]
    assert after == [200, 200, 200, 200, 404]
