"""JSON over HTTP: deadlines, streams, and what is told of a server that cannot be asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from dynamo_core.errors import CannotConnect
from dynamo_leases import JsonClient, JsonStream, StreamEnded, UnsupportedServer, untrusted
from dynamo_testing.servers.ports import free_port


@asynccontextmanager
async def client_of(handler: object, timeout: float = 10.0) -> AsyncIterator[tuple[JsonClient, str]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)  # type: ignore[arg-type]
    client = JsonClient("etcd", tls=None, timeout=timeout)
    async with TestServer(app) as server:
        yield client, str(server.make_url("")).rstrip("/")
        await client.aclose()


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_request_returns_its_json_object() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response({"method": request.method, "body": await request.json(), "query": request.query["a"]})

    async with client_of(echo) as (client, url), client.deadline(url):
        response = await client.send("PUT", f"{url}/x", query={"a": "1"}, body={"b": 2})
        assert await client.read_object(response) == {"method": "PUT", "body": {"b": 2}, "query": "1"}


@pytest.mark.parametrize("body", [b"", b"no", b"[1]", b"\xff"])
async def test_a_non_object_answer_is_none(body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async with client_of(answer) as (client, url), client.deadline(url), await client.send("GET", url) as response:
        assert await client.read_object(response) is None


async def test_a_server_that_does_not_answer_in_time_is_named() -> None:
    async with client_of(hang, timeout=0.05) as (client, url):
        with pytest.raises(CannotConnect, match=rf"^etcd at {url} does not answer$"):
            async with client.deadline(url):
                await client.send("GET", url)


async def test_a_server_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    client = JsonClient("etcd", tls=None, timeout=5.0)
    with pytest.raises(CannotConnect, match=rf"^etcd at {url} cannot be reached: .*Connect call failed"):
        async with client.deadline(url):
            await client.send("GET", url)
    await client.aclose()


async def test_a_non_http_server_is_reported() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+HELLO\r\n\r\n")
        await writer.drain()
        writer.close()

    client = JsonClient("etcd", tls=None, timeout=5.0)
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as odd:
        url = f"http://127.0.0.1:{odd.sockets[0].getsockname()[1]}"
        with pytest.raises(UnsupportedServer, match=f"^this is no etcd: {url} answers what is no HTTP"):
            async with client.deadline(url):
                await client.send("GET", url)
    await client.aclose()


async def lines(request: web.Request) -> web.StreamResponse:
    """Send two messages in three chunks, and what the path names."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"a": 1}\n{"b"')
    await response.write(b": 2}\n")
    if request.path == "/array":
        await response.write(b"[1]\n")
    elif request.path == "/text":
        await response.write(b"no\n")
    elif request.path == "/open":
        await asyncio.Event().wait()
    return response


async def read_all(stream: JsonStream, got: list[object]) -> None:
    while True:
        got += await stream.read()


async def test_a_stream_brings_messages_until_it_ends() -> None:
    async with client_of(lines) as (client, url):
        async with client.deadline(url):
            response = await client.send("GET", f"{url}/end")
        async with client.stream(url, response) as stream:
            got: list[object] = []
            with pytest.raises(StreamEnded, match=f"^etcd at {url} has ended the watch$"):
                await read_all(stream, got)

    assert got == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("path", ["array", "text"])
async def test_a_malformed_stream_line_is_an_error(path: str) -> None:
    async with client_of(lines) as (client, url):
        async with client.deadline(url):
            response = await client.send("GET", f"{url}/{path}")
        async with client.stream(url, response) as stream:
            with pytest.raises(CannotConnect, match=f"^etcd at {url} sends what is no message: ") as caught:
                await read_all(stream, [])

    assert not isinstance(caught.value, StreamEnded)


async def test_leaving_a_stream_closes_its_connection() -> None:
    async with client_of(lines) as (client, url):
        async with client.deadline(url):
            response = await client.send("GET", f"{url}/open")
        connection = response.connection
        assert connection is not None
        transport = connection.transport
        assert transport is not None
        async with client.stream(url, response) as stream:
            while not await stream.read():
                pass

        assert transport.is_closing()
        assert response.closed


def test_a_certificate_that_is_not_trusted_is_an_error_of_the_settings() -> None:
    cause = OSError("no")
    cause.os_error = ssl.SSLCertVerificationError("unknown authority")  # type: ignore[attr-defined]
    mistake = untrusted(CannotConnect("etcd at x cannot be reached: unknown", cause=cause), "discovery.tls")

    assert str(mistake).startswith("discovery.tls.ca: etcd at x cannot be reached: unknown; name the authority")
    assert untrusted(CannotConnect("anything", cause=OSError("else")), "discovery.tls") is None
