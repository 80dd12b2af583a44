"""A listener for a test, and what raw clients do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from dynamo_core.contracts.http_route import HttpRoute
from dynamo_http.listener import Listener

WAIT = 10.0
MEGABYTE = 1 << 20


def make(*routes: HttpRoute, **options: Any) -> Listener:
    """Return a listener on a free port of this host."""
    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "body_limit": MEGABYTE,
        "max_connections": 100,
        "idle_timeout": 30,
    }
    return Listener("public", routes=routes, **(settings | options))


@asynccontextmanager
async def serving(*routes: HttpRoute, **options: Any) -> AsyncIterator[Listener]:
    """Start a listener, and close it afterwards."""
    async with make(*routes, **options) as listener:
        await listener.start()
        yield listener


async def until(condition: Callable[[], bool]) -> None:
    """Return once the listener has come to a state that nothing announces."""
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Return what a connection sends until its end."""
    async with asyncio.timeout(WAIT):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def connect(listener: Listener, data: bytes = b"", **options: Any) -> Any:
    """Return reader and writer of a connection that has sent some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, **options)
    writer.write(data)
    return reader, writer


async def answer_to(listener: Listener, *pieces: bytes, **options: Any) -> bytes:
    """Return what is said until the connection is closed; later pieces are sent a few turns apart."""
    reader, writer = await connect(listener, **options)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        for _ in range(10):
            await asyncio.sleep(0)
    try:
        return await closed(reader)
    finally:
        writer.close()
