"""Bodies that clients pack: unpacked for requests that are authorized, within the limit, and for no others."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_http import body_budget, compressed_bodies
from dynamo_http.auth import AdminToken
from dynamo_http.listener import Listener

from libs.http.tests.serving import WAIT, answer_to
from libs.http.tests.serving import serving as plain

LIMIT = 1 << 20
TOKEN = "the token of these tests"
TEXT = b"what a client has to say " * 1000


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}
#: A gigabyte in a megabyte.
BOMB = gzip.compress(bytes(1 << 26)) * 16


async def echo(http: web.Request) -> web.Response:
    return web.Response(body=await http.read() + await http.read())


async def early(_: web.Request) -> web.Response:
    return web.Response(text="early")


def serving(**options: Any) -> AbstractAsyncContextManager[Listener]:
    routes = [
        HttpRoute("POST", "/echo", echo),
        HttpRoute("POST", "/early", early),
        AdminToken(TOKEN).protect(HttpRoute("POST", "/guarded", echo)),
    ]
    return plain(*routes, **({"body_limit": LIMIT} | options))


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with serving() as listener:
        yield listener


async def post(listener: Listener, path: str, body: bytes, coding: str, *lines: str, chunked: bool = False) -> bytes:
    """Return the whole answer to a body."""
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = [f"POST {path} HTTP/1.1", "host: x", "connection: close", f"content-encoding: {coding}", framing, *lines]
    return await answer_to(listener, "\r\n".join([*head, "", ""]).encode() + body)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def told(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many bytes came out of each piece that was unpacked, by the listener or by the HTTP library."""
    sizes: list[int] = []
    original = zlib.decompressobj

    class Watched:
        def __init__(self, wbits: int = 15) -> None:
            self._real = original(wbits=wbits)

        def decompress(self, data: Any, max_length: int = 0) -> bytes:
            out = self._real.decompress(data, max_length)
            sizes.append(len(out))
            return out

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    return sizes


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("coding", PACKERS)
async def test_a_compressed_body_is_decompressed(listener: Listener, coding: str, chunked: bool) -> None:
    answer = await post(listener, "/echo", PACKERS[coding](TEXT), coding, chunked=chunked)

    assert (status(answer), told(answer)) == (200, TEXT + TEXT)


async def test_a_large_compressed_body_is_decompressed(listener: Listener) -> None:
    text = bytes(range(256)) * (LIMIT // 256)

    answer = await post(listener, "/echo", gzip.compress(text), "gzip")

    assert (status(answer), told(answer)) == (200, text + text)


async def test_deflate_may_come_without_its_header(listener: Listener) -> None:
    answer = await post(listener, "/echo", raw_deflate(TEXT), "deflate")

    assert told(answer) == TEXT + TEXT


async def test_members_of_a_gzip_body_are_one_text(listener: Listener) -> None:
    answer = await post(listener, "/echo", gzip.compress(TEXT) + gzip.compress(b"and more"), "GZip")

    assert told(answer) == (TEXT + b"and more") * 2


async def test_an_identity_encoded_body_is_read_unchanged(listener: Listener) -> None:
    assert told(await post(listener, "/echo", b"plain", "identity")) == b"plainplain"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize(("path", "expected"), [("/early", 200), ("/nowhere", 404), ("/guarded", 401)])
async def test_an_early_answer_decompresses_nothing(
    listener: Listener, unpacked: list[int], path: str, expected: int, chunked: bool
) -> None:
    answer = await post(listener, path, BOMB, "gzip", chunked=chunked)

    assert status(answer) == expected
    assert unpacked == []


async def test_a_body_with_a_valid_token_is_decompressed(listener: Listener) -> None:
    answer = await post(listener, "/guarded", gzip.compress(TEXT), "gzip", f"authorization: Bearer {TOKEN}")

    assert told(answer) == TEXT + TEXT


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_decompression_stops_at_the_body_limit(listener: Listener, unpacked: list[int], coding: str) -> None:
    bomb = BOMB if coding == "gzip" else zlib.compress(bytes(1 << 26))

    answer = await post(listener, "/echo", bomb, coding)

    assert status(answer) == 413
    assert b"exceeds the limit of 1 MB" in told(answer)
    assert 0 < sum(unpacked) <= 2 * LIMIT


async def test_a_body_that_is_just_within_the_limit_is_read() -> None:
    async with serving(body_limit=1000) as listener:
        assert status(await post(listener, "/echo", gzip.compress(bytes(1000)), "gzip")) == 200
        assert status(await post(listener, "/echo", gzip.compress(bytes(1001)), "gzip")) == 413


async def test_large_bodies_are_decompressed_in_a_thread(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loop: list[int] = []
    original = compressed_bodies.inflate

    def inflate(body: bytes, coding: str, limit: int) -> bytes:
        try:
            asyncio.get_running_loop()
            on_the_loop.append(limit)
        except RuntimeError:
            pass
        return original(body, coding, limit)

    monkeypatch.setattr(compressed_bodies, "inflate", inflate)

    assert status(await post(listener, "/echo", gzip.compress(bytes(LIMIT)), "gzip")) == 200
    assert on_the_loop == [body_budget.INLINE]


@pytest.mark.parametrize(
    "body",
    [
        b"hello",
        gzip.compress(TEXT)[:-9],
        gzip.compress(TEXT) + b"rubbish",
        gzip.compress(b"") * (compressed_bodies.MAX_MEMBERS + 1),
        b"",
    ],
    ids=["no gzip at all", "cut off", "something behind it", "too many members", "nothing"],
)
async def test_a_body_that_contradicts_its_encoding_is_a_400(listener: Listener, body: bytes) -> None:
    answer = await post(listener, "/echo", body, "gzip")

    assert status(answer) == 400
    assert b"not encoded, as its header says" in told(answer)


async def test_trailing_data_after_a_deflate_body_is_a_400(listener: Listener) -> None:
    assert status(await post(listener, "/echo", zlib.compress(TEXT) * 2, "deflate")) == 400


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "nothing-known"])
async def test_an_unknown_content_encoding_is_a_415(listener: Listener, coding: str) -> None:
    answer = await post(listener, "/echo", TEXT, coding)

    assert status(answer) == 415
    assert b"Content-Encoding must be gzip, deflate or identity" in told(answer)


async def test_a_body_after_an_early_answer_is_read_up_to_a_bound(listener: Listener) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
    sent = 0
    async with asyncio.timeout(WAIT):
        try:
            while not writer.is_closing():
                writer.write(bytes(1 << 16))
                sent += 1 << 16
                await writer.drain()
        except ConnectionError:
            pass

    # What the kernel holds on both sides comes on top.
    assert sent < LIMIT + (32 << 20)
    writer.close()
