"""A client that closes its sending half gets its whole answer; one that is gone is found out all the same."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_http.half_closed import STATUS_LINE
from dynamo_http.listener import Listener

from libs.http.tests.serving import serving

#: Bytes of an answer that fills the buffers of a connection.
LARGE = 8 << 20
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


class Gate:
    """A handler that answers when it is told to; `ended` is set once it does, or is cancelled."""

    def __init__(self, answer: Callable[[web.Request], Any]) -> None:
        self._answer = answer
        self.entered, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.entered.set()
        try:
            await self.go_on.wait()
        finally:
            self.ended.set()
        response: web.StreamResponse = await self._answer(request)
        return response


async def small(_: web.Request) -> web.Response:
    return web.Response(text="whole")


async def large(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * LARGE)


async def pieces(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(100):
        await response.write(b"x" * 1000)
        await asyncio.sleep(0)
    return response


def routes(*handlers: Gate) -> list[HttpRoute]:
    return [HttpRoute("POST", f"/{number}", handler) for number, handler in enumerate(handlers)]


def request(version: str, path: str = "/0", body: bytes = b"{}") -> bytes:
    return b"POST %b HTTP/%b\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        version.encode(),
        len(body),
        body,
    )


async def connect(listener: Listener, data: bytes, *, half_close: bool = True) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", listener.port))
    client.sendall(data)
    if half_close:
        client.shutdown(socket.SHUT_WR)
    client.setblocking(False)
    return client


async def received(client: socket.socket, size: int | None = None) -> bytes:
    """Return so many bytes, or all until the connection is closed."""
    parts, loop = bytearray(), asyncio.get_running_loop()
    async with asyncio.timeout(10):
        while (size is None or len(parts) < size) and (part := await loop.sock_recv(client, size or 1 << 20)):
            parts += part
    return bytes(parts)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(("answer", "size"), [(small, 5), (large, LARGE), (pieces, 100_000)])
async def test_client_that_closes_its_sending_half_gets_its_whole_answer(version: str, answer: Any, size: int) -> None:
    gate = Gate(answer)
    async with serving(*routes(gate)) as listener:
        with await connect(listener, request(version)) as client:
            # Of the status line the first byte comes ahead, and once only.
            first = await received(client, 1)
            gate.go_on.set()
            head, _, body = (first + await received(client)).partition(b"\r\n\r\n")

    assert head.startswith(f"HTTP/{version} 200 OK\r\n".encode())
    assert body.count(b"x" if size != 5 else b"whole") == (size if size != 5 else 1)


async def test_requests_that_were_sent_before_the_half_close_are_all_answered() -> None:
    gates = [Gate(small), Gate(small)]
    for gate in gates:
        gate.go_on.set()
    async with serving(*routes(*gates)) as listener:
        with await connect(listener, request("1.1", "/0") + request("1.1", "/1")) as client:
            answers = await received(client)
        assert answers.count(b"HTTP/1.1 200 OK") == 2
        assert answers.count(b"whole") == 2


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_gone_clients_request_is_cancelled(version: str) -> None:
    gate = Gate(small)
    async with serving(*routes(gate)) as listener:
        with await connect(listener, request(version), half_close=False):
            await gate.entered.wait()

        async with asyncio.timeout(5):
            await gate.ended.wait()


async def test_a_half_closed_client_that_leaves_has_its_request_cancelled() -> None:
    gate = Gate(small)
    async with serving(*routes(gate)) as listener:
        with await connect(listener, request("1.1")) as client:
            assert await received(client, 1) == STATUS_LINE[:1]

        async with asyncio.timeout(10):
            await gate.ended.wait()


async def test_half_close_in_the_middle_of_a_body_ends_the_request() -> None:
    gate = Gate(small)
    async with serving(*routes(gate)) as listener:
        with await connect(listener, request("1.1")[:-1]) as client:
            assert await received(client) == b""

    assert not gate.entered.is_set()
    assert listener.connections == 0


async def test_half_close_of_an_idle_connection_closes_it_at_once() -> None:
    gate = Gate(small)
    gate.go_on.set()
    async with serving(*routes(gate)) as listener:
        with await connect(listener, request("1.1"), half_close=False) as client:
            assert (await received(client, 50)).startswith(b"HTTP/1.1 200 OK")
            client.shutdown(socket.SHUT_WR)
            await received(client)


async def test_tls_hello_at_a_plain_port_is_logged_once_and_closed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(*routes(Gate(small))) as listener:
        for _ in range(3):
            with await connect(listener, TLS_HELLO, half_close=False) as client, suppress(ConnectionError):
                assert await received(client) == b""

    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the public listener has no TLS, and a client at 127.0.0.1 speaks it" in record.message
