"""Reading the body of a request: the one place where an API waits for it.

The listener bounds how large a body may be and how long it may take. It words what goes wrong with that, 408 and 413
among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from dynamo_core import HttpFault

from dynamo_generation.bodies.bounds import INLINE
from dynamo_generation.bodies.decode import LARGE, parse_object
from dynamo_generation.bodies.piecewise_decoding import free

ResultT = TypeVar("ResultT")

#: Work on large bodies is done one at a time: it takes turns with the event loop as it is.
_large_bodies = ThreadPoolExecutor(1, thread_name_prefix="large-body")


@dataclass(slots=True)
class Body:
    """The JSON object that a client sent, and the bytes that it came in."""

    raw: dict[str, Any]
    size: int

    async def run(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        """Call a function that works on all of it, as `run_for_size`."""
        return await run_for_size(self.size, function, *args)

    async def release(self, http: web.Request) -> None:
        """Let go of a large body: its memory and its place at the listener are for others."""
        if self.size > INLINE:
            self.raw, self.size = {}, 0
            await http.release()

    def free_later(self) -> None:
        """Have a thread free, in steps, what a large body was made into. Nothing may use it any more."""
        if self.size > LARGE:
            _large_bodies.submit(free, self.raw)


async def read_bytes(http: web.Request, *, typed: bool = True) -> bytes:
    """Return the body of a request. Unless it has to be `typed` as JSON, any content type will do.

    Raises:
        HttpFault: another content type; or the listener has waited for it too long while others waited.
        aiohttp.web.HTTPRequestEntityTooLarge: larger than the listener allows.
        aiohttp.web.RequestPayloadError: it broke off, or is late.
    """
    kind = http.content_type
    if typed and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpFault(415, "Expected request with Content-Type application/json")
    return await http.read()


async def read_body(http: web.Request, *, typed: bool = True) -> Body:
    """Return the body of a request as a JSON object within bounds.

    Raises:
        InvalidArgument: not a JSON object, or out of bounds.
        Exception: as `read_bytes` does.
    """
    data = await read_bytes(http, typed=typed)
    return Body(await run_for_size(len(data), parse_object, data), len(data))


async def run_for_size(size: int, function: Callable[..., ResultT], *args: object) -> ResultT:
    """Call a function that works on so many bytes: at once, in a thread, or in the one thread for large bodies.

    A cancelled caller waits for the thread, since that holds the memory of the body.
    """
    if size <= INLINE:
        return function(*args)
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(_large_bodies if size > LARGE else None, lambda: function(*args))
    try:
        await asyncio.wait((running,))
        return running.result()
    finally:
        if not running.done():
            await asyncio.wait((running,))
        # Its error has this frame, which would keep the body until the next collection of garbage.
        del running
