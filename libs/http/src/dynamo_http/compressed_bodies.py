"""Request bodies: read on demand within the budget and the listener's limit, and decompressed.

The HTTP library would unpack the body of any request as it arrives, also of one that is refused. A megabyte can unpack
to a gigabyte. So nothing is unpacked before the handler asks for it, and no more than a body may have.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import HttpVersion, hdrs, web
from aiohttp.http import RawRequestMessage
from dynamo_core.errors import HttpFault

from dynamo_http.body_budget import INLINE, SMALL, WORK, BodyBudget, Lease, TooSlow, run_in_thread
from dynamo_http.request_identity import request_id_of

#: Members of a gzip body, each of which costs some memory to begin. Real clients send one.
MAX_MEMBERS = 1024

_IDENTITY = "identity"
_GZIP, _ZLIB, _RAW = 31, 15, -15
#: Bytes handed over at once. What follows a member is copied, so that there should not be much of it.
_SLICE = 64 * 1024
#: Bytes that come out at once: the interpreter's lock is held while they are copied.
_PIECE = 256 * 1024


class TooLarge(Exception):
    """More would come out than may."""


class BufferedRequest(web.Request):
    """A request whose answer has the product's name, not the library's, in its Server header.

    Its body is read within the budget of the listener.
    """

    budget: BodyBudget | None = None
    _leases: tuple[Lease, ...] = ()

    def answer_in(self, version: HttpVersion) -> None:
        """Answer in another version of HTTP than the client's."""
        self._version = version
        # The library has noted what it was asked for before.
        self._cache.pop("version", None)

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            web.HTTPRequestEntityTooLarge: there is more of it than the listener allows.
            web.RequestPayloadError: it broke off.
            HttpFault: it came too slowly while others waited.
            Unavailable: others did not leave room for it in time.
        """
        if self._read_bytes is None:
            body = await self._arrived()
            if len(body) > INLINE:
                await self._begin_work(len(body))
            self._read_bytes = body
        return self._read_bytes

    async def release(self) -> None:
        """Let go of the body: there will be no more work on it, and `read` gives nothing."""
        self._read_bytes = b""
        self.give_back()

    def give_back(self) -> None:
        """Give back what the body holds of the budget. Safe twice."""
        for lease in self._leases:
            lease.shrink(0)

    async def _arrived(self) -> bytes:
        """Return the body as it was sent; room is made before it is read."""
        content, length, limit = self.content, self.content_length, self.client_max_size
        budget, size, lease = self.budget, 0, None
        parts: list[bytes] = []
        while not content.is_eof() or not parts:
            if lease is None and budget is not None and not content.is_eof() and (length or size) > INLINE:
                # A body that does not say its length may be as large as any.
                lease = await budget.read(limit if length is None else length)
                self._leases = (lease,)
                lease.arrives(content)
            try:
                part = await content.readany()
            except TooSlow:
                raise HttpFault(408, "The request body arrived too slowly while others waited") from None
            if not part:
                break
            parts.append(part)
            size += len(part)
            if size > limit:
                raise web.HTTPRequestEntityTooLarge(limit)
        if lease is not None:
            lease.shrink(size)
        if len(parts) == 1:
            return parts[0]
        # Beyond a megabyte the thread lets go of the interpreter's lock while it copies.
        return b"".join(parts) if size <= SMALL else await run_in_thread(b"".join, parts)

    async def _begin_work(self, size: int) -> None:
        """Make room for work on a body of so many bytes."""
        if self.budget is not None:
            self._leases += (await self.budget.work(size),)

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        # Where the library asks its application, which most requests do not go through. Should it be renamed, only what
        # goes through the application keeps its marks.
        headers = response.headers
        headers.popall(hdrs.SERVER, None)
        headers["x-request-id"] = request_id_of(self)
        await super()._prepare_hook(response)


class CompressedRequest(BufferedRequest):
    """A request with a `Content-Encoding`. `read`, `text` and `json` return the decompressed body."""

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            web.HTTPRequestEntityTooLarge: there is more of it than the listener allows, packed or not.
            web.HTTPUnsupportedMediaType: it is packed in a way that is not known.
            web.RequestPayloadError: it is not packed as the header says.
            HttpFault: it came too slowly while others waited.
            Unavailable: others did not leave room for it in time.
        """
        if self._read_bytes is None:
            coding = self.headers[hdrs.CONTENT_ENCODING].strip().lower()
            if coding == _IDENTITY:
                return await super().read()
            self._read_bytes = await self._unpack(await self._arrived(), coding)
        return self._read_bytes

    async def _unpack(self, body: bytes, coding: str) -> bytes:
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise web.HTTPUnsupportedMediaType(reason="Content-Encoding must be gzip, deflate or identity")
        limit = self.client_max_size
        try:
            if len(body) <= INLINE:
                with suppress(TooLarge):
                    return inflate(body, coding, min(INLINE, limit))
            if len(body) <= SMALL < limit:
                # Most are small: they do not wait for the room that the largest would need.
                with suppress(TooLarge):
                    return await self._unpack_within(SMALL, body, coding)
            return await self._unpack_within(limit, body, coding)
        except TooLarge:
            raise web.HTTPRequestEntityTooLarge(limit) from None
        except zlib.error as error:
            raise web.RequestPayloadError(f"the body is no {coding}: {error}") from error

    async def _unpack_within(self, most: int, body: bytes, coding: str) -> bytes:
        """Unpack a body with room for `most` bytes, and give back the room that it does not need."""
        await self._begin_work(most)
        size = 0
        try:
            unpacked = await run_in_thread(inflate, body, coding, most)
            size = len(unpacked)
        finally:
            if self.budget is not None:
                self._leases[-1].shrink(size * WORK)
        return unpacked


def request_factory(
    body_limit: int, loop: asyncio.AbstractEventLoop, budget: BodyBudget | None
) -> Callable[..., web.Request]:
    """Return what makes the requests of a server; `body_limit` is in bytes."""

    def make(message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> web.Request:
        kind = CompressedRequest if hdrs.CONTENT_ENCODING in message.headers else BufferedRequest
        request = kind(message, payload, protocol, writer, task, loop, client_max_size=body_limit)
        request.budget = budget
        return request

    return make


def inflate(body: bytes, coding: str, limit: int) -> bytes:
    """Return what was packed; `coding` is ``gzip``, ``x-gzip`` or ``deflate``, `limit` in bytes.

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
    full = False
    for start in range(0, len(body), _SLICE):
        data: bytes | memoryview = view[start : start + _SLICE]
        while data or (full and not member.eof):
            if member.eof:
                members -= 1
                if not members:
                    raise zlib.error("too much behind the first member")
                member = zlib.decompressobj(wbits=bits)
            room = min(limit + 1, _PIECE)
            part = member.decompress(data, room)
            # More may be left in the member although it has taken all of the data.
            full = len(part) == room
            limit -= len(part)
            if limit < 0:
                raise TooLarge
            parts.append(part)
            # What did not fit the piece, or is behind the member. Nothing of either kind is in the other.
            data = member.unused_data or member.unconsumed_tail
    if not member.eof:
        raise zlib.error("it is cut off")
    return b"".join(parts)
