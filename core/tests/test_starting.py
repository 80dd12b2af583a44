"""What a starting process finds out of the service on a port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from dynamo_core import startup_waits
from dynamo_core.startup_waits import quote_greeting, read_greeting
from dynamo_testing.servers.ports import free_port

Serve = Callable[..., Awaitable[int]]


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """Start a service that greets, answers the first question, and hangs up or waits; return its port."""
    monkeypatch.setattr(startup_waits, "GREETING_TIMEOUT", 0.2)
    over = asyncio.Event()
    async with AsyncExitStack() as stack:

        async def start(greeting: bytes = b"", answer: bytes = b"", *, waits: bool = False) -> int:
            async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(greeting)
                if answer and await reader.readline():
                    writer.write(answer)
                if waits:
                    await over.wait()
                writer.close()

            server = await asyncio.start_server(meet, "127.0.0.1", 0)
            stack.push_async_callback(server.wait_closed)
            stack.callback(server.close)
            stack.callback(over.set)
            return int(server.sockets[0].getsockname()[1])

        yield start


async def test_a_service_is_recognized_by_greeting_or_answer(serve: Serve) -> None:
    ssh = await serve(greeting=b"SSH-2.0-x\r\n")
    web = await serve(answer=b"HTTP/1.1 400 Bad Request\r\n\r\n")

    assert quote_greeting(await read_greeting("127.0.0.1", ssh)) == "'SSH-2.0-x'"
    assert quote_greeting(await read_greeting("127.0.0.1", web)) == "'HTTP/1.1 400 Bad Request'"


async def test_a_silent_service_may_be_the_right_one(serve: Serve) -> None:
    assert await read_greeting("127.0.0.1", await serve(waits=True)) == b""
    assert await read_greeting("127.0.0.1", await serve()) == b""
    assert await read_greeting("127.0.0.1", free_port()) == b""
