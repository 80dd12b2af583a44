"""Bodies with a `Content-Encoding`: unpacked when a handler reads them, within the limit of the listener.

The HTTP library would unpack the body of any request as it arrives, also of one that is refused. A megabyte can unpack
to a gigabyte. So nothing is unpacked before the handler asks for it, and no more than a body may have.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

from aiohttp import HttpVersion, hdrs, web
from aiohttp.http import RawRequestMessage

from dynamo_core.contracts.frontend import request_id_of

#: Up to this many bytes are unpacked at once; what has more is left to a thread.
INLINE = 64 * 1024
#: Members of a gzip body, each of which costs some memory to begin. Real clients send one.
MAX_MEMBERS = 1024

_IDENTITY = "identity"
_GZIP, _ZLIB, _RAW = 31, 15, -15
#: Bytes handed over at once. What follows a member is copied, so that there should not be much of it.
_SLICE = 64 * 1024
_UNPACKED = web.RequestKey("dynamo.unpacked", bytes)


class TooLarge(Exception):
    """More would come out than may."""


class NamedRequest(web.Request):
    """A request whose answer says what it is called, and not what software made it."""

    def answer_in(self, version: HttpVersion) -> None:
        """The answer is in another version of HTTP than the client's."""
        self._version = version
        # The library has noted what it was asked for before.
        self._cache.pop("version", None)

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        # Where the library asks its application, which most requests do not go through. Should it be renamed, only what
        # goes through the application keeps its marks.
        headers = response.headers
        headers.popall(hdrs.SERVER, None)
        headers["x-request-id"] = request_id_of(self)
        await super()._prepare_hook(response)


class PackedRequest(NamedRequest):
    """A request with a `Content-Encoding`. `read`, `text` and `json` give the body as it was before it was packed."""

    async def read(self) -> bytes:
        """The body.

        Raises:
            web.HTTPRequestEntityTooLarge: there is more of it than the listener allows, packed or not.
            web.HTTPUnsupportedMediaType: it is packed in a way that is not known.
            web.RequestPayloadError: it is not packed as the header says.
        """
        known: bytes | None = self.get(_UNPACKED)
        if known is None:
            coding = self.headers[hdrs.CONTENT_ENCODING].strip().lower()
            known = self[_UNPACKED] = await _unpack(await super().read(), coding, self.client_max_size)
        return known


def request_factory(body_limit: int, loop: asyncio.AbstractEventLoop) -> Callable[..., web.Request]:
    """What makes the requests of a server; `body_limit` is in bytes."""

    def make(message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> web.Request:
        kind = PackedRequest if hdrs.CONTENT_ENCODING in message.headers else NamedRequest
        return kind(message, payload, protocol, writer, task, loop, client_max_size=body_limit)

    return make


async def _unpack(body: bytes, coding: str, limit: int) -> bytes:
    if coding == _IDENTITY:
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise web.HTTPUnsupportedMediaType(reason="Content-Encoding must be gzip, deflate or identity")
    try:
        if len(body) <= INLINE:
            try:
                return inflate(body, coding, min(INLINE, limit))
            except TooLarge:
                if limit <= INLINE:
                    raise
        return await asyncio.to_thread(inflate, body, coding, limit)
    except TooLarge:
        raise web.HTTPRequestEntityTooLarge(limit) from None
    except zlib.error as error:
        raise web.RequestPayloadError(f"the body is no {coding}: {error}") from error


def inflate(body: bytes, coding: str, limit: int) -> bytes:
    """What was packed; `coding` is ``gzip``, ``x-gzip`` or ``deflate``, `limit` in bytes.

    Raises:
        TooLarge: it has more than `limit` bytes.
        zlib.error: the body is cut off, or not packed like this.
    """
    # Some clients leave out the header that deflate should have.
    bits = _GZIP if coding != "deflate" else _ZLIB if body[:1] and body[0] & 0x0F == zlib.DEFLATED else _RAW
    members = MAX_MEMBERS if bits == _GZIP else 1
    parts: list[bytes] = []
    member = zlib.decompressobj(wbits=bits)
    view = memoryview(body)
    for start in range(0, len(body), _SLICE):
        data: bytes | memoryview = view[start : start + _SLICE]
        while data:
            if member.eof:
                members -= 1
                if not members:
                    raise zlib.error("too much behind the first member")
                member = zlib.decompressobj(wbits=bits)
            part = member.decompress(data, limit + 1)
            limit -= len(part)
            if limit < 0:
                raise TooLarge
            parts.append(part)
            # Less than could be had came out, so that nothing is left but what is behind the member.
            data = member.unused_data
    if not member.eof:
        raise zlib.error("it is cut off")
    return b"".join(parts)
