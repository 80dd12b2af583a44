"""How the readers are kept that are fed with bytes: see `tests.architecture.readers`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.architecture.bad_bytes import json_bodies

Feed: TypeAlias = Callable[[bytes], Awaitable[object] | object]
Bodies: TypeAlias = Callable[..., Iterator[tuple[str, bytes]]]


@dataclass(frozen=True)
class Reader:
    """One reader: how it is made, what it is fed, what it may raise, and the places in the sources that it covers."""

    make: Callable[[], AsyncGenerator[Feed, None]]
    sites: tuple[str, ...]
    bodies: Bodies
    good: tuple[bytes, ...]
    raises: tuple[type[Exception], ...]

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Feed, None]:
        """Yield the reader for one test."""
        async with asynccontextmanager(self.make)() as feed:
            yield feed


READERS: dict[str, Reader] = {}


def reader(
    *sites: str, bodies: Bodies = json_bodies, good: Sequence[bytes] = (), raises: Sequence[type[Exception]] = ()
) -> Callable[[Callable[[], AsyncGenerator[Feed, None]]], Callable[[], AsyncGenerator[Feed, None]]]:
    """Put a generator among the readers."""

    def add(make: Callable[[], AsyncGenerator[Feed, None]]) -> Callable[[], AsyncGenerator[Feed, None]]:
        READERS[make.__name__] = Reader(make, sites, bodies, tuple(good), tuple(raises))
        return make

    return add


def to_json(value: object) -> bytes:
    """Return a value as a good body."""
    return msgspec.json.encode(value)


@asynccontextmanager
async def says() -> AsyncGenerator[tuple[str, Callable[[bytes], None]], None]:
    """Yield a server that answers every request with the same bytes: its address, and what sets them."""
    body = b""

    def say(data: bytes) -> None:
        nonlocal body
        body = data

    async def answer(http: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), say
