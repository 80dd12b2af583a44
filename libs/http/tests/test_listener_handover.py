"""How a listener gives way to others on its port, or takes over from them, without a client noticing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_http.listener import Listener

from libs.http.tests.serving import make as plain

REQUEST = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"


class Hello:
    """A handler that tells which listener it belongs to."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, _: web.Request) -> web.Response:
        return web.Response(text=self.name)


def make(name: str = "one", **options: Any) -> Listener:
    return plain(HttpRoute("GET", "/hello", Hello(name)), reuse_port=True, **options)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = make()
    await listener.start()
    yield listener
    await listener.aclose()


async def ask(port: int) -> str:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
        session.get(f"http://127.0.0.1:{port}/hello") as response,
    ):
        return await response.text()


async def until_refused(port: int) -> None:
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()


async def test_a_held_address_does_not_accept() -> None:
    listener = make()
    await listener.start(accept=False)
    try:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)
        await listener.accept()

        assert await ask(listener.port) == "one"
    finally:
        await listener.aclose()


async def test_a_listener_closed_before_accepting_never_accepts() -> None:
    listener = make()
    await listener.start(accept=False)

    await listener.drain_and_close(1)
    await listener.accept()

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", listener.port)


async def test_the_other_listener_on_a_shared_port_takes_over(listener: Listener) -> None:
    other = make("other", port=listener.port)
    await other.start()
    both = {await ask(listener.port) for _ in range(50)}

    await listener.drain_and_close(5)
    left = {await ask(other.port) for _ in range(10)}
    await other.aclose()

    assert both == {"one", "other"}
    assert left == {"other"}


async def test_a_leaving_listener_closes_connections_after_their_answers(listener: Listener) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(REQUEST)
    before = await reader.readuntil(b"one")

    listener.leave()
    writer.write(REQUEST)
    async with asyncio.timeout(5):
        after = await reader.read()
    writer.close()

    assert b"Connection: close" not in before
    assert b"Connection: close" in after
    assert after.endswith(b"one")
    assert await ask(listener.port) == "one"


async def test_a_connection_in_the_backlog_at_a_drain_is_answered(listener: Listener) -> None:
    # Without giving way to the loop, so that nobody has accepted them.
    clients = [socket.create_connection(("127.0.0.1", listener.port), timeout=5) for _ in range(5)]
    clients[0].sendall(REQUEST)
    drain = asyncio.create_task(listener.drain_and_close(5))
    await asyncio.sleep(0)
    for client in clients[1:]:
        client.sendall(REQUEST)

    await asyncio.wait_for(drain, 10)

    for client in clients:
        with client:
            answer = b""
            while data := client.recv(4096):
                answer += data
        assert answer.endswith(b"one")
        assert b"Connection: close" in answer


async def test_the_last_accepted_client_may_still_send_its_request(listener: Listener) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    drain = asyncio.create_task(listener.drain_and_close(5))
    await until_refused(listener.port)

    writer.write(REQUEST)
    async with asyncio.timeout(5):
        answer = await reader.read()
        await drain
    writer.close()

    assert answer.endswith(b"one")


async def test_a_silent_client_does_not_delay_a_drain(listener: Listener) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)

    await asyncio.wait_for(listener.drain_and_close(30), 10)

    assert await reader.read() == b""
    writer.close()
